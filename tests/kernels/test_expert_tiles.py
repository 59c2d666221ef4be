"""The products out of many pairs for Hopper, run on the CPU by a model of their language, and on the card; how pairs are
sorted and tiles planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headway.kernels.expert_mlp import expert_mlp, tiles
from headway.kernels.expert_mlp.tiles import (
    MANY_CHUNK,
    MANY_GROUP,
    MANY_ROWS,
    MANY_STAGES,
    MANY_WIDE,
    group_tile,
    out_is_many,
    sort_parts,
    tile_count,
)
from headway.kernels.expert_mlp.triton import grouped_plain, sort_pairs
from headway.kernels.hopper import runs_gluon
from headway.kernels.testing import interpreter_loops
from headway.kernels.triton_early import launch_early
from tests.kernels.many_model import on_the_cpu
from tests.kernels.test_expert_mlp import check, inputs

Case = tuple[int, int, int, int, int, bool, str, bool]
"""T, E, hidden, inner, K, bias, act, gated."""
CASES: list[Case] = [
    (150, 1, 64, 8, 1, True, "silu", True),  # a half that is not full, inputs and outputs a fraction of a chunk
    (70, 3, 128, 72, 2, False, "gelu_tanh", True),  # upper halves without rows
    (70, 2, 320, 136, 2, True, "clamped_swiglu", True),  # tiles of outputs that are not full
    (140, 2, 64, 264, 1, True, "relu2", False),  # more chunks than stages
    (300, 5, 192, 200, 3, False, "silu", True),
]
FEW_PAIRS = 44
"""Of an expert, on average, from which the products in have tiles of MANY_ROWS."""


def given(case: Case, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    tokens, experts, hidden, inner, top_k, bias, act, gated = case
    return inputs(tokens, experts, hidden, inner, top_k, device=device, dtype=dtype, act=act, gated=gated, bias=bias)


MODELLED = pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the language is for tensors of a CPU")


@pytest.fixture(autouse=True)
def also_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MANY_PAIRS", FEW_PAIRS)


@MODELLED
@pytest.mark.parametrize("case", CASES)
def test_modelled_kernel_equals_reference(case: Case) -> None:
    with on_the_cpu():
        check(given(case, "cpu", torch.float16))


@MODELLED
@pytest.mark.parametrize(("wide", "group"), [(128, 1), (64, 2)])
def test_modelled_tiles_cover_all(wide: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MANY_WIDE": wide, "MANY_STAGES": 2, "MANY_GROUP": group}.items():
        monkeypatch.setattr(f"headway.kernels.expert_mlp.hopper.launch.{name}", value)
    with on_the_cpu(2):
        check(given(CASES[2], "cpu", torch.float16))


@MODELLED
def test_modelled_kernel_without_pairs() -> None:
    arguments = list(given(CASES[1], "cpu", torch.float16))
    arguments[1] = torch.full_like(arguments[1], 3)
    with on_the_cpu(), interpreter_loops():
        assert not expert_mlp.implementation("cuda")(*arguments).any()


@pytest.fixture
def hopper() -> str:
    if not torch.cuda.is_available() or not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
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


def test_tiles_are_for_many_pairs_of_rows_that_copies_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert out_is_many(192 * 8, 8, 768) and not out_is_many(192 * 8 - 1, 8, 768) and not out_is_many(10**5, 8, 764)
    room = MANY_STAGES * (MANY_ROWS + MANY_WIDE) * MANY_CHUNK * 2 + MANY_WIDE * MANY_ROWS * 2
    assert room + 512 <= 227 << 10
    for pairs in (1, 300, 4096, 10**5, 10**6):
        parts = sort_parts(pairs)
        assert parts == 256 or (4 <= parts <= 128 and parts * 32 >= pairs)


def test_high_tiles_share_large_weights() -> None:
    """The plan of the products out is that of the products in: both have tiles of MANY_ROWS. 32 MiB are 4,096 gates and as many
    ups of 2,048 inputs."""
    for pairs, outputs, group in (
        (44, 4097, MANY_GROUP),
        (192, 4097, MANY_GROUP),
        (10**4, 4097, MANY_GROUP),
        (10**4, 4096, 1),
    ):
        tile = group_tile(pairs, 1, outputs, 2048, item=2, paired=True, fp4=False, room=99 << 10)
        assert (tile.rows, tile.group) == (MANY_ROWS, group)
    assert group_tile(10**4, 1, 4097, 2048, item=2, paired=False, fp4=False, room=99 << 10).group == 1
    assert group_tile(43, 1, 4097, 2048, item=2, paired=True, fp4=False, room=227 << 10).group == 1


@pytest.mark.parametrize(
    ("pairs", "experts", "kind", "group"),
    [
        (140, 3, "some", 16),
        (2100, 7, "some", 4),
        (9000, 300, "some", 1),
        (600, 5, "one", 16),
        (300, 4, "none", 2),
        (44, 1, "one", 1),
    ],
)
def test_pairs_are_sorted_and_planned(
    pairs: int, experts: int, kind: str, group: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, by expert; the products in are those of the pairs' experts; every tile of the plan is of one expert, and
    all pairs are in one."""
    monkeypatch.setattr(tiles, "MANY_GROUP", group)
    monkeypatch.setattr(tiles, "LARGE_WEIGHTS", 0)
    generator = torch.Generator().manual_seed(pairs)
    ids = torch.randint(-2, experts + 2, (pairs,), generator=generator, dtype=torch.int32)
    if kind != "some":
        ids[:] = experts - 1 if kind == "one" else experts
    ids[::11] = 2**31 - 1
    there = (ids >= 0) & (ids < experts)
    wanted = ids.where(there, 2**30).sort(stable=True).indices[: int(there.sum())]
    with interpreter_loops():
        order, counts = sort_pairs(ids.to(device), experts)
    assert torch.equal(order[: len(wanted)].cpu().long(), wanted)
    assert torch.equal(counts.cpu().long(), torch.bincount(ids[there], minlength=experts))
    if pairs < FEW_PAIRS * experts:
        return
    x, weight = (torch.randn(n, 16, generator=generator).half().to(device) for n in (pairs, experts * 264))
    found = torch.zeros(pairs, 264, dtype=torch.float16, device=device)
    plan = torch.full((1 + tile_count(pairs, experts, MANY_ROWS), 4), -1, dtype=torch.int32, device=device)
    sizes: dict[str, Any] = {"E": experts, "TOP_K": 1, "WEIGH": False, "FP4": False}
    into: dict[str, Any] = {"ACT": "relu", "GATED": False}
    matrix, none = (weight.view(experts, 264, 16), None, None), torch.empty(0, device=device)
    with interpreter_loops():
        early = launch_early(x.device)
        grouped_plain(x, order, counts, none, matrix, found, plan, (0.0, 0.0), True, sizes, into, early)
    tiles_of, first = [], 0
    for expert, count in enumerate(counts.tolist()):
        tiles_of += [[expert, first + at, count - at] for at in range(0, count, MANY_ROWS)]
        rows = x[wanted[first : first + count].to(device)]
        product = (rows @ weight[264 * expert : 264 * (expert + 1)].T).relu()
        torch.testing.assert_close(found[first : first + count], product, atol=0.02, rtol=0.01)
        first += count
    rows_of_plan = plan[1 : 1 + int(plan[0, 0]), :3].tolist()
    assert rows_of_plan == (tiles_of or [[experts - 1, 0, 0]])
