"""What commands say and how they end: each number stands where its name is, each error has its status."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from headway.cli import chat, env, errors
from headway.cli.bench import datasets
from headway.cli.bench.datasets import SHAREGPT_BOTH, SHAREGPT_LEAST, SHAREGPT_PROMPT, make_items
from headway.cli.bench.drafts import DraftCounts, sentence
from headway.cli.bench.serve_args import ServeArgs
from headway.cli.main import app
from headway.cli.streaming import Answer
from headway.core.errors import ConfigError, EngineDeadError, HeadwayError, RequestFailedError


def test_figures_of_an_engine() -> None:
    stats = SimpleNamespace(
        num_steps=3,
        prompt_tokens=40,
        generation_tokens=7,
        prefix_cache_hits=2,
        prefix_cache_queries=8,
        kv_cache_usage=0.5,
    )
    info = SimpleNamespace(model="m", architecture="A", dtype="float16", device="cpu", max_model_len=96)

    async def told() -> Any:
        return stats

    speaker = chat.LocalSpeaker(SimpleNamespace(stats=told, model_info=info), None)  # type: ignore[arg-type]
    assert speaker.name == "m on cpu"
    assert asyncio.run(speaker.figures()) == [
        "engine: A in float16 on cpu, context 96 tokens",
        "3 steps, 40 prompt tokens (25% found in the prefix cache), 7 generated, 50% of the KV cache in use",
    ]
    stats.prefix_cache_hits = stats.prefix_cache_queries = 0
    assert "(0% found" in asyncio.run(speaker.figures())[1]


def test_figures_of_a_conversation() -> None:
    async def none() -> list[str]:
        return []

    told = chat.Conversation(SimpleNamespace(figures=none), None, True)
    assert told._figures() == ["this conversation: no answer yet"]
    told._answers += [Answer([""], 3, 10, 2.0, 0.25, "stop"), Answer([""], 4, 20, 4.0, None, "length")]
    assert told._figures() == [
        "this conversation: 2 answers, 30 tokens in 6.00 s (5.00 tok/s)",
        "last answer: 20 tokens in 4.00 s (5.00 tok/s), prompt 4 tokens, finish length",
    ]
    line = "10 tokens in 2.00 s (5.00 tok/s), time to first token 250.0 ms, prompt 3 tokens, finish stop"
    assert told._answers[0].line() == line


def test_lines_at_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C at the prompt says how to leave, Ctrl-D leaves; blanks around a line are nothing."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    typed: Iterator[str | BaseException] = iter([KeyboardInterrupt(), "  /system be  ", EOFError()])

    def read(prompt: str) -> str:
        assert prompt == "> "
        if isinstance(line := next(typed), BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    told = chat.Conversation(SimpleNamespace(name="somebody"), None, True)
    told.run()
    assert told.messages == [{"role": "system", "content": "be"}]
    said = capsys.readouterr().err
    assert said.startswith(f"somebody. {chat.GREETING}\n\n(/quit or Ctrl-D leaves)\n") and said.endswith(")\n\n")


def test_figures_of_drafts() -> None:
    found = DraftCounts(10, 40, 25).since(DraftCounts(2, 8, 5))
    assert found == DraftCounts(8, 32, 20) == found.since(None)
    assert sentence(found) == "Drafted: 32 tokens, accepted: 20, acceptance length: 3.50" and sentence(None) == ""
    assert sentence(DraftCounts(0, 0, 0)).endswith("none: nothing was drafted")


def test_figures_of_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    embed = importlib.import_module("headway.cli.bench.embed")  # the folder's own name for it is the command's
    latencies = [i / 1000 for i in range(101)]
    row = embed._row(32, 50, 4.0, latencies, 1.0)
    assert row.pop("p50_ms") == pytest.approx(50) and row.pop("p99_ms") == pytest.approx(99)
    assert row == {
        "input_len": 32,
        "num_prompts": 50,
        "elapsed_time": 4.0,
        "texts_per_second": 12.5,
        "client_busy": 0.25,
    }
    said = capsys.readouterr().out
    assert said == "    32 tokens:       12.5 texts/s, a request p50 50.0 ms, p99 99.0 ms (this client was busy 25%)\n"
    texts = embed.random_texts(random.Random(3), 4, 9)
    assert [len(text.split()) for text in texts] == [7] * 4 and len({*texts}) == 4
    assert embed.random_texts(random.Random(3), 1, 1)[0] in embed.WORDS, "one word at least"


def test_an_option_of_another_engine_gets_no_suggestion_beside() -> None:
    for option in ("--max-batch-tokens", "--model-path", "--tp-size"):
        result = CliRunner().invoke(app, ["serve", option, "3"])
        assert result.exit_code == 2 and "No such option" in result.output
        assert "Did you mean" not in result.output and "Possible options" not in result.output


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("wrong\n  words"), 2, "headway: wrong words\n"),
        (HeadwayError("x"), 2, "headway: x\n"),
        (EngineDeadError("gone"), 1, "headway: gone\n"),
        (RequestFailedError("no"), 1, "headway: no\n"),
        (ValueError("odd"), 1, "headway: internal error: ValueError: odd (HEADWAY_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(7), 7, ""),
    ],
)
def test_errors_have_a_line_and_a_status(
    error: BaseException, status: int, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWAY_DEBUG", raising=False)

    @errors.clean_errors
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        command()
    assert (ended.value.exit_code, capsys.readouterr().err) == (status, text)
    if isinstance(error, Exception) and not isinstance(error, typer.Exit):
        monkeypatch.setenv("HEADWAY_DEBUG", "1")
        with pytest.raises(type(error)):
            command()


def test_a_reader_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as out:
        monkeypatch.setattr("sys.stdout", out)

        @errors.clean_errors
        def command() -> None:
            raise BrokenPipeError

        with pytest.raises(typer.Exit) as ended:
            command()
        assert ended.value.exit_code == 0
        out.write("nobody reads this")
    assert (tmp_path / "out").read_text(encoding="utf-8") == ""


def test_what_a_machine_with_a_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="Card", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for pinned, text in ((True, "yes"), (False, "no (copies to the device will block)")):
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _, pinned=pinned: pinned)
        found = env._devices()
        assert found["device"] == "cuda 13.0: Card, 80 GiB, sm_90; Card, 80 GiB, sm_90"
        assert found["pinned memory"] == text and found["run-ahead"] == found["CUDA graphs"] == "yes"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch is built for CUDA 13.0 but sees no GPU" in env._devices()["device"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "a CPU build of torch" in env._devices()["device"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("a.wav", "--format", "ass"), "--format must be one of text, srt, vtt, json"),
        (("a.wav", "--word-timestamps"), "--word-timestamps are written with --format json, not text"),
        (("a.wav", "b.wav", "--format", "srt"), "--format srt takes one recording; 2 were given"),
        (("a.wav", "b.wav", "--format", "vtt"), "--format vtt takes one recording"),
    ],
)
def test_what_transcribing_refuses(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["transcribe", *arguments])
    assert result.exit_code == 2 and text in result.output


class _Words:
    """A tokenizer with a token a word; id 0 is special."""

    vocab_size, special_ids = 5, frozenset({0, 3})

    def encode(self, text: str, **_: Any) -> list[str]:
        return text.split()


def test_conversations_at_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each limit from both sides; umlauts whatever the locale's encoding is."""
    monkeypatch.setattr("headway.api.tokenizer.load_tokenizer", lambda _: _Words())
    lengths = [
        (SHAREGPT_LEAST, SHAREGPT_LEAST, True), (SHAREGPT_LEAST - 1, 9, False), (9, SHAREGPT_LEAST - 1, False),
        (SHAREGPT_PROMPT, SHAREGPT_BOTH - SHAREGPT_PROMPT, True), (SHAREGPT_PROMPT + 1, 9, False),
        (9, SHAREGPT_BOTH - 9, True), (9, SHAREGPT_BOTH - 8, False),
    ]  # fmt: skip
    rows = [{"conversations": [{"value": "\u00e4 " * n}, {"value": "b " * m}, {"value": ""}]} for n, m, _ in lengths]
    file = tmp_path / "turns.json"
    file.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    options: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": file, "tokenizer": "t"}
    items = make_items(ServeArgs(**options, num_prompts=3))
    assert sorted((item.num_tokens, item.output_len) for item in items) == sorted(
        (n, m) for n, m, fit in lengths if fit
    )
    assert all(item.prompt == "\u00e4 " * (item.num_tokens or 0) for item in items)
    short = make_items(ServeArgs(**options, num_prompts=9, sharegpt_output_len=1))
    assert {item.num_tokens for item in short} == {4, 9, SHAREGPT_PROMPT}, (
        "an answer's own length counts only where it is used"
    )
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="no conversation of fitting length"):
        make_items(ServeArgs(**options, num_prompts=1))


def test_random_ids_are_not_special(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.api.tokenizer.load_tokenizer", lambda _: _Words())
    found = datasets.Vocabulary(ServeArgs(tokenizer="t")).ids(random.Random(0), 200)
    assert len(found) == 200 and {*found} == {1, 2, 4}


def test_output_that_is_piped_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is read from a pipe ends with it; the end of input is told from an empty line."""
    monkeypatch.setattr("sys.stdin", io.StringIO(" a \n\n"))
    told = chat.Conversation(SimpleNamespace(name=""), None, True)
    assert [told._read() for _ in range(3)] == ["a", "", None]
