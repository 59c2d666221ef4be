"""``time_warp``: the way through a table of costs, by reference and kernel, beside transformers' program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.kernels.time_warp import time_warp
from tests.kernels.guarded import run_both

SIZES = [(1, 1), (1, 9), (7, 1), (2, 2), (5, 31), (31, 5), (63, 64), (13, 257)]


def expected(costs: torch.Tensor) -> list[int]:
    """transformers'."""
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    found: Any = _dynamic_time_warping(costs.double().numpy())
    tokens, frames = found
    return [int(frames[tokens == token].min()) for token in range(len(costs))]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_both_go_the_way_of_transformers(size: tuple[int, int], ties: bool) -> None:
    costs = torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))
    if ties:  # sums of whole numbers are exact, and often equal
        costs = costs.round()
    for _, starts in run_both(time_warp, (costs,)):
        assert starts.tolist() == expected(costs)


def test_costs_that_are_no_numbers_lead_nowhere_else() -> None:
    costs = torch.randn(9, 20, generator=torch.Generator().manual_seed(1))
    costs[3:6, 2:18] = float("nan")
    for table in (costs, torch.full((9, 20), float("nan"))):
        for _, starts in run_both(time_warp, (table,)):
            assert ((starts >= 0) & (starts < 20)).all() and np.all(np.diff(starts.numpy()) >= 0)
