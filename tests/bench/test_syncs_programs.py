"""bench/syncs_programs.py: what is compared, on the CPU and on a card."""

from __future__ import annotations

from typing import Any

import pytest

from bench import syncs_programs


def made(seconds: float, lines: list[int], result: int = 1, **more: Any) -> dict[str, Any]:
    findings = [{"line": line, "source": f"line {line}", "kind": "read", "count": 2} for line in lines]
    times = {"seconds": seconds, "processor": seconds / 2, "torch": "2.11"}
    return {**times, "result": result, "findings": findings, "unproven": [], **more}


def test_the_simulation_is_held_against_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"cpu": made(1.0, []), "cuda": made(4.0, [3])}
    monkeypatch.setattr(syncs_programs, "run", lambda name, device, options, times: runs[device])
    line = syncs_programs.simulated("nanogpt", 2)
    assert (line["cpu_processor"], line["simulated_seconds"], line["same"]) == (0.5, 4.0, True)
    runs["cuda"] = made(4.0, [3], result=2)
    assert syncs_programs.simulated("nanogpt", 2)["same"] is False
    runs["cuda"] = {"error": "ModuleNotFoundError", "missing": True}
    assert syncs_programs.simulated("nanogpt", 2)["missing"]


def test_a_card_judges_the_guard_and_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {(): made(1.0, []), ("--driver", "off"): made(1.1, [3]), ("--driver", "cupti"): made(1.2, [3, 5])}
    monkeypatch.setattr(syncs_programs, "run", lambda name, device, options, times: runs[tuple(options)])
    line = syncs_programs.on_a_card("resnet", 3, made(9.0, [5, 8]))
    assert [line[f"{way}_seconds"] for way in ("plain", "guarded", "cupti")] == [1.0, 1.1, 1.2]
    assert line["guard_missed"] == [(5, "line 5")]
    assert line["simulation_missed"] == [(3, "line 3")] and line["simulation_said_more"] == [(8, "line 8")]
    assert "simulation_missed" not in syncs_programs.on_a_card("resnet", 3, {})
    runs[("--driver", "off")] = {"error": "died", "missing": False}
    assert syncs_programs.on_a_card("resnet", 3, {}) == {"error": "died", "missing": False}
