"""The products of many pairs for Hopper, run on the CPU by a model of their language, and on the card; how pairs are sorted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headway.kernels.expert_mlp.tiles import MANY_ROWS, tile_count
from headway.kernels.expert_mlp.triton import sort_pairs
from headway.kernels.testing import interpreter_loops
from tests.kernels.many_model import on_the_cpu
from tests.kernels.test_expert_mlp import check, inputs

CASES: list[tuple[int, int, int, int, int, bool, str, bool]] = [
    (150, 1, 64, 8, 1, True, "silu", True),  # a half that is not full, inputs and outputs a fraction of a chunk
    (60, 3, 128, 72, 2, False, "gelu_tanh", True),  # upper halves without rows
    (70, 2, 320, 136, 2, True, "clamped_swiglu", True),  # more chunks than stages
    (140, 2, 64, 264, 1, True, "relu2", False),
    (300, 5, 192, 200, 3, False, "silu", True),
]
"""(T, E, hidden, inner, K, bias, act, gated)."""


def given(case: tuple[int, int, int, int, int, bool, str, bool], device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    tokens, experts, hidden, inner, top_k, bias, act, gated = case
    return inputs(tokens, experts, hidden, inner, top_k, device=device, dtype=dtype, act=act, gated=gated, bias=bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the language is for tensors of a CPU")
@pytest.mark.parametrize("case", CASES)
def test_modelled_kernels_equal_reference(case: tuple[int, int, int, int, int, bool, str, bool]) -> None:
    with on_the_cpu():
        check(given(case, "cpu", torch.float16))


@pytest.mark.parametrize(
    ("pairs", "experts", "kind"),
    [(70, 3, "some"), (5000, 7, "some"), (5000, 128, "some"), (4500, 5, "one"), (300, 4, "none"), (1, 1, "one")],
)
def test_pairs_are_sorted_and_planned(pairs: int, experts: int, kind: str, device: str) -> None:
    """In their order, by expert; every tile of the plan is of one expert, and all pairs are in one."""
    generator = torch.Generator().manual_seed(pairs)
    ids = torch.randint(-2, experts + 2, (pairs,), generator=generator, dtype=torch.int32)
    if kind != "some":
        ids[:] = experts - 1 if kind == "one" else experts
    ids[::11] = 2**31 - 1
    with interpreter_loops():
        order, counts, plan = sort_pairs(ids.to(device), experts, planned=True)
    there = (ids >= 0) & (ids < experts)
    wanted = ids.where(there, 2**30).sort(stable=True).indices[: int(there.sum())]
    assert torch.equal(order[: len(wanted)].cpu().long(), wanted)
    assert torch.equal(counts.cpu().long(), torch.bincount(ids[there], minlength=experts))
    assert plan is not None and len(plan) == 1 + tile_count(pairs, experts, MANY_ROWS)
    found = [tuple(row) for row in plan[1 : 1 + int(plan[0, 0]), :3].tolist()]
    tiles_of, first = [], 0
    for expert, count in enumerate(counts.tolist()):
        tiles_of += [(expert, first + at, min(count - at, MANY_ROWS)) for at in range(0, count, MANY_ROWS)]
        first += count
    assert found == (tiles_of or [(0, 0, 0)])
    with interpreter_loops():
        assert torch.equal(sort_pairs(ids.to(device), experts, planned=False)[0][: len(wanted)].cpu().long(), wanted)
