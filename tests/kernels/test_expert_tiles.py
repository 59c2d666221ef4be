"""The products of many pairs for Hopper, run on the CPU by a model of their language, and on the card; how pairs are sorted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headway.kernels.expert_mlp import expert_mlp, tiles
from headway.kernels.expert_mlp.tiles import (
    MANY_CHUNK,
    MANY_ROWS,
    SEGMENTS,
    ManyTile,
    are_many,
    many_tile,
    segment_block,
    tile_count,
)
from headway.kernels.expert_mlp.triton import sort_pairs
from headway.kernels.hopper import runs_gluon
from headway.kernels.testing import interpreter_loops
from tests.kernels.many_model import on_the_cpu
from tests.kernels.test_expert_mlp import check, inputs

Case = tuple[int, int, int, int, int, bool, str, bool]
"""T, E, hidden, inner, K, bias, act, gated."""
CASES: list[Case] = [
    (150, 1, 64, 8, 1, True, "silu", True),  # a half that is not full, inputs and outputs a fraction of a chunk
    (60, 3, 128, 72, 2, False, "gelu_tanh", True),  # upper halves without rows
    (70, 2, 320, 136, 2, True, "clamped_swiglu", True),  # more chunks than stages
    (140, 2, 64, 264, 1, True, "relu2", False),
    (300, 5, 192, 200, 3, False, "silu", True),
]


def given(case: Case, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    tokens, experts, hidden, inner, top_k, bias, act, gated = case
    return inputs(tokens, experts, hidden, inner, top_k, device=device, dtype=dtype, act=act, gated=gated, bias=bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the language is for tensors of a CPU")
@pytest.mark.parametrize("case", CASES)
def test_modelled_kernels_equal_reference(case: Case) -> None:
    with on_the_cpu():
        check(given(case, "cpu", torch.float16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the language is for tensors of a CPU")
@pytest.mark.parametrize(("wide", "group"), [(128, 1), (256, 2)])
def test_modelled_tiles_cover_all(wide: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headway.kernels.expert_mlp.hopper.launch.many_tile",
        lambda *, paired: ManyTile(wide, 3 if paired else 2, group),
    )
    with on_the_cpu(2):
        check(given(CASES[2], "cpu", torch.bfloat16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the language is for tensors of a CPU")
def test_modelled_kernels_without_pairs() -> None:
    arguments = list(given(CASES[1], "cpu", torch.float16))
    arguments[1] = torch.full_like(arguments[1], 3)
    with on_the_cpu(), interpreter_loops():
        assert not expert_mlp.implementation("cuda")(*arguments).any()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> str:
    if not torch.cuda.is_available() or not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    monkeypatch.setattr(tiles, "MANY_PAIRS", 0)
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES, (3000, 16, 1024, 768, 4, False, "silu", True)])
def test_kernels_equal_reference(case: Case, dtype: torch.dtype, hopper: str) -> None:
    """Within rounding; again with the same bits; pairs do not depend on others."""
    arguments = list(given(case, hopper, dtype))
    check(tuple(arguments))
    found = expert_mlp(*arguments)
    for _ in range(20):
        assert torch.equal(expert_mlp(*arguments), found), "a moving result would be a race"
    half = case[0] // 2
    arguments[1] = arguments[1].clone()
    arguments[1][half:] = -1
    apart = expert_mlp(*arguments)
    assert torch.equal(apart[:half], found[:half]) and not apart[half:].any()


def test_tiles_are_for_many_pairs_of_rows_that_copies_can_reach() -> None:
    assert are_many(96 * 8, 8, 2048, 768) and not are_many(96 * 8 - 1, 8, 2048, 768)
    assert not are_many(10**5, 8, 2048 + 32, 768) and not are_many(10**5, 8, 2048, 764)
    for paired in (True, False):
        tile = many_tile(paired=paired)
        waiting = tile.wide // (2 if paired else 1) * MANY_ROWS * 2
        assert tile.stages * (MANY_ROWS + tile.wide) * MANY_CHUNK * 2 + waiting + 512 <= 227 << 10
    for pairs in (1, 300, 4096, 10**5, 10**6):
        segment, block = segment_block(pairs)
        assert segment % block == 0 and block >= 256 and block <= 2048
        assert segment * SEGMENTS >= pairs


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
