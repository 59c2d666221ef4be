"""``headway embed`` and ``headway bench embed`` over an engine that pools without a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from headway.cli import embed
from headway.cli.main import app
from headway.server.app import build_app
from headway.server.settings import ServerSettings
from tests.api import pooling_core
from tests.api.pooling_core import WORDS, install
from tests.server.pooling_app import pooling_llm
from tests.server.serving import Served

TEXTS = ["w1", "w2 w3", "w4"]
SUMS = [float(5 + sum(map(WORDS.index, text.split()))) for text in TEXTS]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_plain_lines_to_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "PART", 2)
    source, target = tmp_path / "texts.txt", tmp_path / "out.npy"
    source.write_text("w1\n\nw2 w3\nw4\n", encoding="utf-8")
    result = invoke("embed", str(source), "--model", "embed", "-o", str(target))
    assert result.exit_code == 0, result.output
    assert result.stderr.endswith("3 texts, 8 numbers each\n")
    found = np.load(target)
    assert found.dtype == np.float32 and found.shape == (3, 8) and found[:, 1].tolist() == SUMS


def test_json_lines_keep_what_they_have(tmp_path: Path) -> None:
    source, target = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": 7, "text": "w1"}\n"w2 w3"\nw4\n', encoding="utf-8")
    assert invoke("embed", str(source), "--model", "embed", "-o", str(target)).exit_code == 0
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [row["embedding"][1] for row in rows] == SUMS
    assert rows[0]["id"] == 7 and rows[0]["text"] == "w1" and rows[1]["index"] == 1


def test_from_stdin_to_stdout_with_a_field_and_dimensions() -> None:
    arguments = ("embed", "--model", "embed", "--field", "body", "--dimensions", "2")
    result = invoke(*arguments, stdin='{"body": "w1"}\n{"body": "' + "w1 " * 90 + '"}\n')
    rows = [json.loads(line)["embedding"] for line in result.stdout.splitlines()]
    assert rows[0] == [3.0, SUMS[0]] and rows[1][0] == 64.0


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("nowhere.txt",), "", "there is no file 'nowhere.txt'"),
        (("-o", "/nowhere/x.npy"), "w1", "there is no folder '/nowhere'"),
        ((), "\n\n", "there is no text"),
        ((), '{"title": "w1"}', "line 1: no text under 'text', 'input'"),
        (("--field", "body"), 'w1\n{"body"', "line 2: no valid JSON"),
        (("--dimensions", "9"), "w1", "dimensions must be at most 8"),
        (("--prompt-name", "query"), "w1", "this model has no prompts"),
        (("--no-truncate",), "w1 " * 90, "truncate_prompt_tokens"),
    ],
)
def test_errors_are_one_line_and_status_2(arguments: tuple[str, ...], stdin: str, message: str) -> None:
    result = invoke("embed", "--model", "embed", *arguments, stdin=stdin)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1], result.output


def test_bench_embed_counts_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, word in enumerate(("FAIL", "WRONG", "HANG")):  # no random token may ask the engine to misbehave
        monkeypatch.setattr(pooling_core, word, -1 - number)
    target = tmp_path / "figures.json"
    sizes = ("--input-len", "8", "--input-len", "16", "--num-prompts", "20")
    for extra in ((), ("--text",)):
        result = invoke("bench", "embed", "embed", *sizes, *extra, "--output-json", str(target))
        assert result.exit_code == 0, result.output
        rows = json.loads(target.read_text(encoding="utf-8"))
        assert [(row["input_len"], row["num_prompts"]) for row in rows] == [(8, 20), (16, 20)]
        assert rows[1]["tokens_per_second"] == pytest.approx(rows[1]["requests_per_second"] * 16)
    assert "longer than max_model_len=64" in invoke("bench", "embed", "embed", "--input-len", "65").stderr
    assert "serves score" in invoke("bench", "embed", "cross").stderr


def test_bench_embed_asks_a_server(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    llm = pooling_llm("embed")
    try:
        with Served(build_app(llm, ServerSettings(access_log=False))) as url:
            sizes = ("--input-len", "8", "--num-prompts", "21", "--batch-size", "4", "--max-concurrency", "3")
            result = invoke("bench", "embed", "--base-url", url, *sizes, "--output-json", str(target))
            assert result.exit_code == 0, result.output
            [row] = json.loads(target.read_text(encoding="utf-8"))
            assert row["num_prompts"] == 21 and row["p50_ms"] <= row["p99_ms"]
            assert llm.request_metrics.tasks == {"embed": 25}  # the first request was asked once more, to warm up
            refused = invoke("bench", "embed", "--base-url", url, "--input-len", "99", "--num-prompts", "1")
            assert refused.exit_code != 0 and "max_model_len" in refused.output + refused.stderr
    finally:
        llm.shutdown()
