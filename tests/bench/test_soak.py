"""The soak, for a second, on the CPU: it passes on the engine as it is, and says what is wrong with a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.soak import Soak, main
from headway.core.messages import AddRequest
from headway.engine.core import EngineCore
from headway.runner.admission import AdmissionWriter
from tests.engine.harness import Answer
from tests.engine.tiny_llama import VOCAB


def soak(tmp_path: Path, seconds: float = 0.5) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "soak.json"
    words = ["--minutes", str(seconds / 60), "--json", str(out), "--device", "cpu", "--every", "3"]
    return main([*words, "--run-ahead", "2"]), json.loads(out.read_text())


def test_a_sound_engine(tmp_path: Path) -> None:
    status, result = soak(tmp_path)
    assert status == 0 and result["ok"] and result["over"] and not result["wrong"]
    assert result["finished"] > 5 and result["finished"] + result["aborted"] == result["requests"]
    assert result["checked"] == result["agreed"] > 0 and result["steps"] > 0
    assert result["guard"] == "none: no CUDA" and result["guarded_launches"] == 0


def test_wrong_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = Soak._finished

    def garbled(self: Soak, request: AddRequest, answer: Answer) -> None:
        answer.token_ids[0] = (answer.token_ids[0] + 1) % VOCAB
        finished(self, request, answer)

    monkeypatch.setattr(Soak, "_finished", garbled)
    status, result = soak(tmp_path)
    assert status == 1 and not result["ok"] and "differs from depth 0" in result["wrong"][0]
    assert result["agreed"] == 0


def test_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdmissionWriter, "forget", lambda self, request_id: None)
    status, result = soak(tmp_path)
    assert status == 1 and "former requests are still kept" in result["wrong"][0]


def test_an_update_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = EngineCore.step

    def twice(self: EngineCore) -> Any:
        updates = step(self)
        under_load = self.stats().run_ahead > 0  # the oracle is spared
        return [*updates, *(update for update in updates if update.finish_reason and under_load)]

    monkeypatch.setattr(EngineCore, "step", twice)
    status, result = soak(tmp_path)
    assert status == 1 and result["wrong"][0].startswith("KeyError")
