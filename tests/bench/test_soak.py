"""The soak, for a second, on the CPU: it passes on the engine as it is, and says what is wrong with a broken one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.soak import Soak, main
from headway.core.messages import AddRequest
from headway.engine.core import EngineCore
from headway.runner.admission import AdmissionWriter
from tests.engine.harness import Answer, run
from tests.engine.tiny_llama import VOCAB


def soak(tmp_path: Path, requests: int = 12) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "soak.json"
    words = ["--seconds", "0", "--requests", str(requests), "--json", str(out), "--device", "cpu", "--every", "3"]
    return main([*words, "--run-ahead", "2"]), json.loads(out.read_text())


def test_a_sound_engine(tmp_path: Path) -> None:
    status, result = soak(tmp_path)
    assert status == 0 and result["ok"] and result["over"] and not result["wrong"]
    assert result["finished"] > 5 and result["finished"] + result["aborted"] == result["requests"]
    assert result["checked"] == result["agreed"] == result["agreed_alone"] > 0 and result["steps"] > 0
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
    made = Soak.__init__

    def with_echo(self: Soak, core: EngineCore, *others: Any) -> None:
        made(self, core, *others)
        step = core.step

        def twice() -> Any:
            updates = step()
            return [*updates, *(update for update in updates if update.finish_reason)]

        monkeypatch.setattr(core, "step", twice)

    monkeypatch.setattr(Soak, "__init__", with_echo)
    status, result = soak(tmp_path)
    assert status == 1 and result["wrong"][0].startswith("KeyError")


def test_a_depth_that_changes_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def garbled(core: EngineCore, requests: list[AddRequest]) -> dict[str, Answer]:
        answers = run(core, requests)
        if core.stats().run_ahead:
            for answer in answers.values():
                answer.token_ids[-1] += 1
        return answers

    monkeypatch.setattr("bench.soak.run", garbled)
    status, result = soak(tmp_path)
    assert status == 1 and "alone: " in result["wrong"][0] and result["agreed_alone"] == 0
    assert result["agreed"] == result["checked"] > 0


def test_a_run_that_is_ended_from_outside_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Soak.turn

    def ended(self: Soak) -> None:
        turn(self)
        if self.tally.finished == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Soak, "turn", ended)
    with pytest.raises(SystemExit, match="from outside"):
        soak(tmp_path, 60)
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["finished"] == 6 and not result["over"] and not result["ok"] and not result["wrong"]
    assert [path.name for path in tmp_path.iterdir()] == ["soak.json"]
