"""The bench of users behind one system prompt: who hits what, and what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import shared_prompt
from tests.engine.tiny_llama import CONFIG
from tests.recurrent.tiny_hybrids import folder_of

SMALL = ["--users", "6", "--shared", "90", "--own", "10", "--runs", "1", "--device", "cpu", "--cache-bytes", "16777216"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    dense = tmp_path_factory.mktemp("models") / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    return [dense, folder_of("mamba2")]


def test_what_is_shared_is_hit(folders: list[Path], tmp_path: Path) -> None:
    """Of 90 tokens five blocks of 16. Of a new prompt the first user hits nothing, with states the second neither."""
    models = [word for folder in folders for word in ("--model", str(folder))]
    path = shared_prompt.main([*models, *SMALL, "--out", str(tmp_path)])
    report = json.loads(path.read_text())
    whole = 100 * 80 / 90
    for folder, new in zip(folders, (5 / 6, 4 / 6), strict=True):
        ways = report["models"][folder.name]
        assert list(ways) == ["off", "new", "known"]
        assert ways["off"]["tokens_hit_pct"] == 0
        assert ways["new"]["tokens_hit_pct"] == pytest.approx(new * whole)
        assert ways["known"]["tokens_hit_pct"] == pytest.approx(whole)
        for found in ways.values():
            assert 0 < found["first_token_ms_p50"] <= found["first_token_ms_p99"] <= found["all_first_tokens_ms"]
            assert found["all_first_tokens_ms"] < found["all_answers_ms"] and found["steps"] >= shared_prompt.TOKENS
    assert report["sizes"] == {"users": 6, "shared": 90, "own": 10, "runs": 1, "every": 0.0}
    text = path.with_suffix(".md").read_text()
    assert text.startswith("# 6 users on one system prompt of 90 tokens, on CPU") and "| dense | known | " in text


def test_times_count_from_when_a_user_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 5 s: users due at 0, 1 and 2 s, of whom the last two are only noticed behind the first step."""
    clock = [0.0]
    monkeypatch.setattr(shared_prompt, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    waiting: list[str] = []

    def step() -> list[Any]:
        clock[0] += 5.0
        ended = [
            SimpleNamespace(request_id=name, new_token_ids=[1], finish_reason="length", error=None) for name in waiting
        ]
        waiting.clear()
        return ended

    core: Any = SimpleNamespace(add=lambda each: waiting.append(each.request_id), has_work=lambda: waiting, step=step)
    times = shared_prompt.serve(core, shared_prompt.requests("u", [[1]] * 3), every=1.0)
    assert times == {"u-0": [0.0, 5.0, 5.0], "u-1": [1.0, 10.0, 10.0], "u-2": [2.0, 10.0, 10.0]}
    found = shared_prompt.figures(times, 30, 20)
    assert (found["first_token_ms_p50"], found["tokens_hit_pct"]) == (8000.0, 50.0)
