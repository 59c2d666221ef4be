"""The commands over a fake engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import headway
from headway.api import frontend
from headway.cli import streaming
from headway.cli.bench.offline import nano_workload
from headway.cli.main import app
from headway.core.errors import WeightsError
from tests.api import fakes
from tests.engine import fake_core
from tests.engine.fake_core import ROOT

SEED = ("--sampling-seed", "0")


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch)


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_generate() -> None:
    result = invoke("generate", "fake", "-p", "a", "--no-chat", "--max-tokens", "5", *SEED)
    assert result.exit_code == 0, result.output
    assert result.stdout == "bcdef\n"
    assert result.stderr.startswith("5 tokens in ")
    assert "time to first token" in result.stderr
    assert "prompt 2 tokens, finish length" in result.stderr


def test_generate_from_stdin_without_streaming() -> None:
    result = invoke("generate", "--no-stream", "--no-chat", "--stop", "f", *SEED, stdin="a")
    assert result.stdout == "bcde\n"
    assert "finish stop" in result.stderr


def test_generate_uses_the_chat_template_by_default() -> None:
    result = invoke("generate", "-p", "a", "--max-tokens", "1", *SEED)
    assert result.stdout == "?\n"  # the character after ">", which ends the template
    assert f"prompt {len('<user>a<assistant>')} tokens" in result.stderr


def test_generate_several_completions() -> None:
    result = invoke("generate", "-p", "a", "--no-chat", "--n", "2", "--max-tokens", "2", *SEED)
    assert result.stdout == "bc\n---\ncd\n"
    assert result.stderr.startswith("4 tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "-p", " "), "there is no prompt"),
        (("generate", "-p", "a", "--top-p", "0"), "top_p must be in (0, 1]"),
        (("generate", "-p", "a", "--dtype", "int3"), "dtype must be one of"),
        (("generate", "m", "--model", "other", "-p", "a"), "given twice"),
        (("generate", "wrong-config", "-p", "a"), "that cannot be"),
        (("generate", "too-big", "-p", "a"), "does not fit"),
        (("chat", "--skip-tokenizer-init"), "no chat template"),
    ],
)
def test_user_errors_are_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments, stdin="")
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("headway: ")
    assert message in line


@pytest.mark.parametrize("arguments", [("generate", "--no-such-flag"), ("nonsense",), ("generate", "--top-k", "many")])
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_internal_errors_are_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("generate", "bug", "-p", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("headway: internal error: KeyError")
    monkeypatch.setattr(fakes.ByteTokenizer, "encode", lambda *_, **__: [fake_core.CRASH])
    result = invoke("generate", "-p", "a")
    assert result.exit_code == 1
    assert "crash asked for" in result.stderr
    monkeypatch.setattr(fakes.ByteTokenizer, "encode", lambda *_, **__: [fake_core.FAIL])
    result = invoke("generate", "-p", "a")
    assert result.exit_code == 1
    assert result.stderr.strip() == "headway: failure asked for"


def test_tokenizer_errors_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise WeightsError("no such file")

    monkeypatch.setattr(frontend, "load_tokenizer", broken)
    result = invoke("generate", "-p", "a")
    assert (result.exit_code, result.stderr) == (2, "headway: no such file\n")


def test_chat_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    render = frontend.ChatRenderer.render

    def spy(self: frontend.ChatRenderer, messages: Any, options: Any) -> str:
        seen.append([message["content"] for message in messages])
        return render(self, messages, options)

    monkeypatch.setattr(frontend.ChatRenderer, "render", spy)
    typed = "hi\n\nmore\n/help\n/reset\nnew\n"
    result = invoke("chat", "fake", "--system", "be", "--max-tokens", "2", *SEED, stdin=typed)
    assert result.exit_code == 0, result.output
    assert result.stdout == "?@\n" * 3
    assert seen == [["be", "hi"], ["be", "hi", "?@", "more"], ["be", "new"]]
    assert "Ctrl-D" in result.stderr
    assert result.stderr.count("tok/s") == 3


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_commands_of_a_chat(monkeypatch: pytest.MonkeyPatch, leave: str) -> None:
    seen: list[list[str]] = []
    render = frontend.ChatRenderer.render

    def spy(self: frontend.ChatRenderer, messages: Any, options: Any) -> Any:
        seen.append([message["content"] for message in messages])
        return render(self, messages, options)

    monkeypatch.setattr(frontend.ChatRenderer, "render", spy)
    typed = f"/stats\nhi\n/stats\n/system be\n/system\nnew\n/stats off\n//x\n/clear\nlast\n/nonsense\n{leave}\nnever\n"
    result = invoke("chat", "fake", "--max-tokens", "2", *SEED, stdin=typed)
    assert result.exit_code == 0, result.output
    assert seen == [["hi"], ["be", "new"], ["be", "new", "?@", "/x"], ["be", "last"]]
    said = result.stderr
    assert said.index("no answer yet") < said.index("1 answers, 2 tokens") < said.index("(system message: be)")
    assert "generated" in said and said.count("(2 tokens in") == 2, "figures after answers until they were turned off"
    assert "no command '/nonsense'" in said


def test_an_interrupt_stops_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    follow = streaming.stream_answer

    async def interrupted(outputs: Any, answer: Any, show: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            answer.texts[0] = "begun"
            await outputs.aclose()
            raise KeyboardInterrupt
        await follow(outputs, answer, show)

    monkeypatch.setattr("headway.cli.chat.stream_answer", interrupted)
    result = invoke("chat", "--max-tokens", "1", *SEED, stdin="one\ntwo\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "\n?\n"
    assert "finish abort" in result.stderr


def test_a_chat_that_grows_too_long_goes_on_after_reset() -> None:
    result = invoke("chat", "--max-model-len", "40", "--max-tokens", "2", *SEED, stdin=f"{'x' * 90}\n/reset\nhi\n")
    assert result.exit_code == 0, result.output
    assert "max_model_len is 40" in result.stderr
    assert result.stdout == "?@\n"


def test_bench_throughput(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = invoke(
        "bench", "throughput", "fake", "--input-len", "5", "--output-len", "3", "--num-prompts", "4", "--n", "2",
        "--output-json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    first, second, third = result.stdout.splitlines()
    assert first.startswith("Throughput: ")
    assert [part.split(" ", 1)[1] for part in first.removeprefix("Throughput: ").split(", ")] == [
        "requests/s", "total tokens/s", "output tokens/s",
    ]  # fmt: skip
    assert (second, third) == ("Total num prompt tokens:  20", "Total num output tokens:  24")
    figures = json.loads(file.read_text())
    assert figures["num_requests"] == 4
    assert figures["total_num_tokens"] == 44
    assert figures["requests_per_second"] == pytest.approx(4 / figures["elapsed_time"])


def test_bench_throughput_nano() -> None:
    result = invoke("bench", "throughput", "--nano", "--num-prompts", "3")
    assert result.exit_code == 0, result.output
    prompts, params = nano_workload(3, fake_core.VOCAB, True)
    assert f"Total num prompt tokens:  {sum(map(len, prompts))}" in result.stdout
    assert f"Total num output tokens:  {sum(p.max_tokens or 0 for p in params)}" in result.stdout


def test_the_nano_workload() -> None:
    prompts, params = nano_workload(256, 50_000, True)
    assert nano_workload(256, 50_000, True)[0] == prompts
    assert len(prompts) == len(params) == 256
    assert all(100 <= len(prompt) <= 1024 for prompt in prompts)
    assert all(100 <= (p.max_tokens or 0) <= 1024 and p.temperature == 0.6 and p.ignore_eos for p in params)
    assert max(map(max, prompts)) <= 10_000
    assert sum(map(len, prompts)) == 142827
    assert sum(p.max_tokens or 0 for p in params) == 133966


def test_bench_latency_traces_one_more_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("bench", "latency", "--input-len", "4", "--output-len", "2", "--num-iters-warmup", "0", "--num-iters", "1")
    page, done = tmp_path / "page.html", []

    def write(path: Path, command: str, work: Any) -> str:
        done.append((path, command, len(work())))
        return "trace: written"

    refused = invoke(*words, "--trace", str(page))
    assert refused.exit_code == 2 and "--trace: nothing to watch" in refused.output
    monkeypatch.setattr("headway.cli.trace.require_tracing", lambda: None)
    monkeypatch.setattr("headway.cli.trace.write_timeline", write)
    result = invoke(*words, "--batch-size", "3", "--trace", str(page))
    assert result.exit_code == 0 and "trace: written" in result.stdout, result.output
    assert done == [(page, "headway bench latency", 3)]
    invoke(*words)
    assert len(done) == 1


def test_bench_latency(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = invoke(
        "bench", "latency", "--input-len", "4", "--output-len", "2", "--batch-size", "2", "--num-iters-warmup", "1",
        "--num-iters", "3", "--output-json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Avg latency: ")
    assert lines[0].endswith(" seconds")
    assert [line.partition(":")[0] for line in lines[1:]] == [
        f"{p}% percentile latency" for p in (10, 25, 50, 75, 90, 99)
    ]
    figures = json.loads(file.read_text())
    assert len(figures["latencies"]) == 3
    assert set(figures["percentiles"]) == {"10", "25", "50", "75", "90", "99"}


def test_a_failed_request_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.bench.offline.random_prompts", lambda *_: [[fake_core.FAIL]])
    result = invoke("bench", "latency", "--num-iters", "1")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "failure asked for" in result.stderr


def test_version() -> None:
    assert invoke("--version").stdout == f"headway {headway.__version__}\n"


def test_env_names_what_matters() -> None:
    result = invoke("env")
    assert result.exit_code == 0, result.output
    for label in ("headway:", "torch:", "device:", "C compiler:", "pinned memory:", "run-ahead:"):
        assert label in result.stdout


def test_help_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['headway', 'bench', 'throughput', '--help']\n"
        "try: runpy.run_module('headway', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--gpu-memory-utilization" in done.stdout
