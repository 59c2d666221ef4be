"""The soak under simulation: it goes on where it was, and a seed that fails is kept with its command until it passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import simulation_soak


def soak(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = simulation_soak.main(["--json", str(path), "--first", "30", *words])
    return status, json.loads(path.read_text())


def test_real_scenarios_pass(tmp_path: Path) -> None:
    status, report = soak(tmp_path / "o.json", "--number", "2")
    assert status == 0 and (report["first"], report["number"], report["failed"]) == (30, 2, [])
    assert report["cpu_seconds"] > 0


def test_a_failure_is_kept_with_its_command_and_the_rest_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[int] = []
    broken = {31, 33}

    def play(seed: int) -> None:
        played.append(seed)
        assert seed not in broken, "planted"

    monkeypatch.setattr(simulation_soak, "play", play)
    status, report = soak(tmp_path / "o.json", "--number", "3")
    assert status == 1 and played == [30, 31, 32]
    (failed,) = report["failed"]
    assert (failed["seed"], failed["again"]) == (31, "python -m tests.sim.replay 31") and "planted" in failed["error"]
    assert "again: python -m tests.sim.replay 31" in capsys.readouterr().out
    broken.remove(31)
    status, report = soak(tmp_path / "o.json", "--number", "5")
    assert status == 1 and played[3:] == [31, 33, 34], "what failed comes first, what passed does not come again"
    assert report["number"] == 5
    assert [each["seed"] for each in report["failed"]] == [33] and report["mended"] == [failed]
    broken.clear()
    status, report = soak(tmp_path / "o.json", "--number", "5")
    assert status == 0 and not report["failed"] and len(report["mended"]) == 2


def test_a_sitting_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_soak, "play", lambda seed: None)
    assert soak(tmp_path / "o.json", "--number", "10", "--seconds", "0")[1]["number"] == 0


def test_a_report_of_other_seeds_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_soak, "play", lambda seed: None)
    soak(tmp_path / "o.json", "--number", "1")
    with pytest.raises(ValueError, match="begins at seed 30"):
        simulation_soak.main(["--json", str(tmp_path / "o.json"), "--first", "40"])
