"""Programs of many kinds end under the simulation as they do on the CPU: all of bench/programs/syncs_sweep, in the soak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import syncs_sweep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", syncs_sweep.FILES)
def test_every_program_ends_as_on_the_cpu(file: str) -> None:
    assert syncs_sweep.unexpected(syncs_sweep.sweep(syncs_sweep.chosen([file], []))) == []


def test_the_sweep_tells_what_differs() -> None:
    def honest(device: str) -> Any:
        return {"x": torch.ones(2, device=device).sum(), "n": 3}

    def other_values(device: str) -> Any:
        return torch.full((2,), float(device == "cuda"), device=device)

    def other_places(device: str) -> Any:
        return [1] * (1 + (device == "cuda"))

    def dies(device: str) -> None:
        torch.zeros(3, device=device)
        if device == "cuda":
            raise KeyError("only there")

    def raises(device: str) -> None:
        torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)

    def stays_on_the_host(device: str) -> Any:
        return torch.ones(2)

    found = {
        program.__name__: syncs_sweep.compare(program.__name__, program)["verdict"]
        for program in (honest, other_values, other_places, dies, raises, stays_on_the_host)
    }
    assert found == {
        "honest": "same",
        "other_values": "differs",
        "other_places": "differs",
        "dies": "crash",
        "raises": "same error",
        "stays_on_the_host": "unproven",
    }
    assert syncs_sweep.differing({"a": np.ones(2)}, {"a": np.ones(2) + 1e-6}) == []
    assert syncs_sweep.unexpected([{"name": "training/swa", "verdict": "differs", "why": "x"}]) != []


GENERATORS = """
def each_known(): yield "a", lambda device: 1
def each_missing():
    import package_that_is_nowhere
    yield "b", None
"""


def test_a_missing_package_leaves_out_its_own_programs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "generated.py").write_text(GENERATORS)
    assert list(syncs_sweep.programs("generated", tmp_path)) == ["known:a"]
    assert "generated/each_missing: left out, No module named 'package_that_is_nowhere'" in capsys.readouterr().out


def test_a_card_draws_other_numbers_and_is_watched_by_each_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"file": "a.py", "line": 1}]
    ended = {"findings": found, "live": [], "cupti": found, "unproven": []}

    def run(program: Any, how: str) -> Any:
        return ({}, {"": np.ones(2)}) if how == syncs_sweep.PLAIN else (ended, {"": np.zeros(2)})

    monkeypatch.setattr(syncs_sweep, "run", run)
    line = syncs_sweep.compare("drawn", lambda device: None, syncs_sweep.CARD)
    assert (line["verdict"], line["findings"], line["live"], line["cupti"]) == ("same", found, [], found)
    line = syncs_sweep.compare("drawn", lambda device: None)
    assert line["verdict"] == "differs" and "cupti" not in line
