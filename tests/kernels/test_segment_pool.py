"""``segment_pool``: the reference against a loop, the other implementations against the reference; padding holds NaN."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.segment_pool import MAXIMUM, SUM, WEIGHTED_SUM, segment_pool
from headway.kernels.testing import assert_close, interpreter_loops, make_random

LENGTHS, LENS, SKIP = [5, 1, 40, 2, 3, 0], [5, 1, 60, 0, 9, 0], [0, 3, 25, 0, 7, 0]
"""A whole text, one skipped whole, a chunk cut by what it skips, a zombie, another chunk, padding."""


def inputs(columns: int, device: str) -> tuple[torch.Tensor, ...]:
    total = sum(LENGTHS)
    hidden = make_random(total + 2, columns, dtype=torch.float32, device=device)
    hidden[total:] = float("nan")
    hidden[46:48] = float("nan")  # the zombie's
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    return hidden, *(torch.as_tensor(each).int().to(device) for each in (starts, LENS, SKIP))


def by_token(hidden: torch.Tensor, kind: int) -> torch.Tensor:
    rows, start = [], 0
    for length, end, skip in zip(LENGTHS, LENS, SKIP, strict=True):
        found = torch.full(hidden.shape[1:], float("-inf") if kind == MAXIMUM else 0.0, dtype=torch.float64)
        for i in range(length if end else 0):
            position, x = end - length + i, hidden[start + i].double()
            if position >= skip:
                weight = position + 1 if kind == WEIGHTED_SUM else 1
                found = torch.maximum(found, x) if kind == MAXIMUM else found + weight * x
        start += length
        rows.append(found)
    return torch.stack(rows).float()


@pytest.mark.parametrize("kind", [SUM, MAXIMUM, WEIGHTED_SUM])
def test_reference_follows_the_formula(kind: int) -> None:
    given = inputs(7, "cpu")
    torch.testing.assert_close(segment_pool.reference(*given, kind), by_token(given[0], kind), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kind", [SUM, MAXIMUM, WEIGHTED_SUM])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_implementations_equal_the_reference(kind: int, where: str, device: str) -> None:
    given = inputs(70, "cpu" if where == "cpu" else device)
    with interpreter_loops():
        found = segment_pool.implementation(where)(*given, kind)
    torch.testing.assert_close(found, segment_pool.reference(*given, kind), atol=1e-3, rtol=1e-5)


def test_meta_gives_shapes() -> None:
    rows = torch.empty(3, device="meta", dtype=torch.int32)
    pooled = segment_pool(torch.empty(5, 8, device="meta", dtype=torch.bfloat16), rows, rows[1:], rows[1:], SUM)
    assert pooled.shape == (2, 8) and pooled.dtype == torch.float32
    assert_close(pooled.new_zeros(1, device="cpu"), torch.zeros(1))
