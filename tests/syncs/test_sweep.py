"""Programs of many kinds end under the simulation as they do on the CPU: all of bench/programs/syncs_sweep, in the soak."""

from __future__ import annotations

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
