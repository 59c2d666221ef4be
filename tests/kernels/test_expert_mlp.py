"""``expert_mlp``: the reference against loops, the other implementations against the reference; ids beyond the experts, and
memory that no kernel wrote, are everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.core.ints import cdiv
from headway.kernels.expert_mlp import add_experts, expert_mlp, tiles
from headway.kernels.expert_mlp.packing import codes_of, packed
from headway.kernels.expert_mlp.reference import E2M1, activate, unpacked
from headway.kernels.expert_mlp.tiles import (
    GroupTile,
    distinct_experts,
    few_tile,
    group_tile,
    group_word_tile,
    is_few,
    tile_count,
)
from headway.kernels.testing import TOLERANCE, interpreter_loops, kernel_dtypes, make_random

ACTS = [
    ("silu", True),
    ("gelu_tanh", True),
    ("gelu", False),
    ("relu2", False),
    ("relu", True),
    ("clamped_swiglu", True),
]


def inputs(
    tokens: int, experts: int, hidden: int, inner: int, top_k: int, *, device: str, dtype: torch.dtype = torch.float32,
    act: str = "silu", gated: bool = True, bias: bool = False, fp4: bool = False, weigh: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of the op: ids with holes, of which some are none of these experts', and one row without any."""
    outputs = 2 * inner if gated else inner
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
    if top_k > 1:
        ids[tokens // 3 :: 4, -1] = -1
    if tokens > 1:
        ids[tokens // 2 :: 7] = -1
    if tokens > 4:
        ids[1, 0], ids[2, 0] = experts, 2**31 - 1
    weights = make_random(tokens, top_k, dtype=torch.float32, device=device, seed=2)

    def matrix(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not fp4:
            return make_random(experts, rows, columns, dtype=dtype, device=device, seed=seed) / columns**0.5, None
        packed = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        return packed.to(device), scales.to(device)

    (gate_up, gate_up_scales), (down, down_scales) = matrix(outputs, hidden, 3), matrix(hidden, inner, 4)
    biases = [make_random(experts, n, dtype=dtype, device=device, seed=6) if bias else None for n in (outputs, hidden)]
    return (
        make_random(tokens, hidden, dtype=dtype, device=device, seed=1), ids.to(device), weights, gate_up, biases[0],
        gate_up_scales, down, biases[1], down_scales, act, gated, 1.5, 1.7, weigh,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs programs one by one."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(tiles, "PROGRAMS", 8)


def by_loops(given: tuple[Any, ...]) -> torch.Tensor:
    """In f64, pair by pair."""
    x, ids, weights, gate_up, b1, _, down, b2, _, act, gated, limit, alpha, weigh = given
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for k, e in enumerate(ids[t].tolist()):
            if not 0 <= e < len(gate_up):
                continue
            weight = float(weights[t, k])
            inner = gate_up[e].double() @ (x[t].double() * (weight if weigh else 1.0))
            inner = activate((inner if b1 is None else inner + b1[e])[None], act, gated, limit, alpha)[0]
            result = down[e].double() @ inner + (0 if b2 is None else b2[e].double())
            y[t] += result * (1.0 if weigh else weight)
    return y


@pytest.mark.parametrize(("act", "gated"), ACTS)
@pytest.mark.parametrize("where", ["reference", "cpu"])
def test_reference_follows_the_formula(where: str, act: str, gated: bool) -> None:
    given = inputs(8, 5, 12, 7, 3, device="cpu", act=act, gated=gated, bias=True)
    op = expert_mlp.reference if where == "reference" else expert_mlp.implementation("cpu")
    torch.testing.assert_close(op(*given).double(), by_loops(given), atol=1e-5, rtol=1e-5)


def check(given: tuple[Any, ...]) -> None:
    with interpreter_loops():
        found = expert_mlp.implementation("cuda")(*given)
    wanted = expert_mlp.reference(*given)
    assert wanted.any(), "nothing went to any expert"
    absolute, relative = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, atol=absolute * max(1.0, float(wanted.abs().max())), rtol=relative)


@pytest.mark.parametrize("dtype", kernel_dtypes()[-1:])
@pytest.mark.parametrize(("act", "gated"), ACTS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_kernels_equal_reference(tokens: int, act: str, gated: bool, dtype: torch.dtype, device: str) -> None:
    check(inputs(tokens, 9, 72, 40, 3, device=device, dtype=dtype, act=act, gated=gated, bias=gated))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "fp4"),
    [(1, 3, 3, True), (2, 33, 1, False), (6, 12, 4, True), (90, 3, 2, False), (50, 3, 2, True)],
)
def test_any_number_of_tokens(tokens: int, experts: int, top_k: int, fp4: bool, device: str) -> None:
    for dtype in kernel_dtypes()[:: 1 if device == "cuda" else 2]:
        check(inputs(tokens, experts, 128, 64, top_k, device=device, dtype=dtype, fp4=fp4, bias=fp4))


@pytest.mark.parametrize(
    ("act", "gated", "bias", "weigh"), [("silu", True, True, True), ("relu2", False, False, False)]
)
def test_the_widest_tiles(
    act: str, gated: bool, bias: bool, weigh: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a tile of outputs, of inputs, and of pairs is empty."""
    monkeypatch.setattr("headway.kernels.expert_mlp.triton.shared_limit", lambda device: 227 << 10)
    tile = group_tile(70, 1, 160, 72, item=2, paired=gated, fp4=False, room=227 << 10)
    assert (tile.rows, tile.block_n, tile.together) == (128, 128 if gated else 256, gated)
    check(inputs(70, 1, 72, 160, 1, device=device, dtype=torch.float16, act=act, gated=gated, bias=bias, weigh=weigh))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize(("tokens", "fp4"), [(1, False), (3, True), (30, False)])
def test_experts_are_added(where: str, tokens: int, fp4: bool, device: str) -> None:
    """Tokens of no expert keep what they have."""
    device = device if where == "cuda" else "cpu"
    given = inputs(tokens, 40, 64, 128, 2, device=device, fp4=fp4, bias=True)
    residual = make_random(tokens, 64, dtype=torch.float32, device=device, seed=8)
    found, wanted = residual.clone(), residual.clone()
    with interpreter_loops():
        add_experts.implementation(where)(*given, found)
    add_experts.reference(*given, wanted)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    nowhere = ((given[1] < 0) | (given[1] >= 40)).all(1)
    assert torch.equal(found[nowhere], residual[nowhere]) and not torch.equal(wanted, residual)


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("fp4", [False, True])
def test_weights_of_what_goes_in(tokens: int, fp4: bool, device: str) -> None:
    check(inputs(tokens, 6, 64, 64, 2, device=device, fp4=fp4, weigh=True))


@pytest.mark.parametrize("tokens", [2, 60])
def test_all_tokens_to_one_expert(tokens: int, device: str) -> None:
    given = list(inputs(tokens, 7, 64, 32, 1, device=device))
    given[1] = torch.full_like(given[1], 6)
    check(tuple(given))
    given[1] = torch.full_like(given[1], -1)
    with interpreter_loops():
        assert not expert_mlp.implementation("cuda")(*given).any()


def test_rows_do_not_depend_on_their_neighbours(device: str) -> None:
    """The same tokens at the same places, beside others and beside none: the same bits."""
    given = list(inputs(40, 6, 64, 32, 2, device=device))
    with interpreter_loops():
        together = expert_mlp.implementation("cuda")(*given)
        given[1] = given[1].clone()
        given[1][20:] = -1
        apart = expert_mlp.implementation("cuda")(*given)
    assert torch.equal(together[:20], apart[:20]) and not apart[20:].any()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("where", ["reference", "cpu", "cuda"])
def test_experts_are_summed_in_the_order_of_choice(where: str, tokens: int, device: str) -> None:
    """1e8 + 1 - 1e8 is 0 in f32, and 1 in another order."""
    device = device if where == "cuda" else "cpu"
    down = torch.zeros(3, 64, 64)
    down[0], down[1], down[2] = 1e8 / 64, 1 / 64, -1e8 / 64
    ids = torch.tensor([[0, 2, 1], [0, 1, 2]], dtype=torch.int32).repeat(tokens, 1)[:tokens]
    ones = torch.ones(3, 64, 64) / 64
    given = (torch.ones(tokens, 64), ids, torch.ones(tokens, 3), ones, None, None, down, None, None)
    op = expert_mlp.reference if where == "reference" else expert_mlp.implementation(where)
    with interpreter_loops():
        y = op(*(x if x is None else x.to(device) for x in given), "relu", False, 0.0, 1.0, False)
    wanted = torch.tensor([1.0, 0.0]).repeat(tokens)[:tokens, None].expand(tokens, 64)
    assert torch.equal(y.cpu(), wanted)


def test_ranks_add_up() -> None:
    """A rank with some of the experts calls the op with numbers relative to its first."""
    given = list(inputs(6, 5, 16, 8, 3, device="cpu"))
    whole = expert_mlp.reference(*given)
    total = torch.zeros_like(whole)
    for first, end in ((0, 2), (2, 5)):
        own = list(given)
        own[1] = torch.where((given[1] >= first) & (given[1] < end), given[1] - first, -1)
        own[3], own[6] = given[3][first:end], given[6][first:end]
        total += expert_mlp.implementation("cpu")(*own)
    torch.testing.assert_close(total, whole)


def test_mxfp4_values() -> None:
    codes = torch.tensor([*range(16), *range(16), *range(15, -1, -1), *range(15, -1, -1)], dtype=torch.uint8)
    values = unpacked(packed(codes), torch.tensor([127, 130], dtype=torch.uint8))
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    assert torch.equal(values[:32], table.repeat(2)) and torch.equal(values[32:], 8 * table.flip(0).repeat(2))


def test_packing_keeps_every_code_at_every_place() -> None:
    words = torch.arange(2**16).repeat(16, 1).T.reshape(-1)  # each word sixteen times
    whole = torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8).flatten()
    assert torch.equal(packed(codes_of(whole)), whole)
    codes = torch.arange(64, dtype=torch.uint8) % 16
    codes[7], codes[7 + 16], codes[7 + 32], codes[7 + 48] = 15, 1, 10, 13
    word = int(packed(codes).view(torch.int16)[7]) & 0xFFFF
    assert word == 0x81C0 | 1 << 3 | (0x200 | 2) | (0x4000 | 0x2000 | 0x400)


def test_bounds_hold_for_any_spread() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        experts, rows = (int(torch.randint(1, high, (), generator=generator)) for high in (20, 40))
        counts = torch.randint(0, 60, (experts,), generator=generator) ** torch.randint(
            0, 2, (experts,), generator=generator
        )
        tiles = int(((counts + rows - 1) // rows).sum())
        assert tiles <= tile_count(int(counts.sum()), experts, rows)


def test_tiles_follow_the_mean_and_fit() -> None:
    """More pairs an expert never make its tiles lower; every tile fits the room it is given."""
    for room in (99 << 10, 227 << 10):
        for item in (2, 4):
            rows = 0
            for pairs in (1, 8, 64, 500, 4000, 10**5):
                tile = group_tile(pairs, 60, 1408, 2048, item=item, paired=True, fp4=False, room=room)
                assert isinstance(tile, GroupTile) and tile.rows >= rows
                assert tile.num_stages * (tile.rows + 2 * tile.block_n) * tile.block_k * item <= room
                rows = tile.rows
                words = group_word_tile(pairs, 60)
                assert min(128, 0.75 * pairs / 60) <= words.rows <= 128
                assert words.stages >= 3 and 128 * words.stages * (words.rows * 2 + words.height // 2) <= 227 << 10
    assert is_few(1, 8, 8) and is_few(4, 8, 128) and not is_few(16, 8, 128) and not is_few(8, 2, 8)
    for columns in (64, 768, 1440, 14336):
        few = few_tile(8, 768, columns, fp4=False)
        assert few.block_n in (2, 4, 8) and few.block_k % 32 == 0 and cdiv(columns, few.block_k) <= 16
    assert distinct_experts(1, 8, 128) == pytest.approx(8) and 127 < distinct_experts(256, 8, 128) < 128


def test_meta_gives_shapes() -> None:
    x = torch.empty(3, 8, device="meta", dtype=torch.float16)
    y = expert_mlp(x, x, x, x, None, None, x, None, None, "silu", True, 0.0, 1.0, False)
    assert y.shape == (3, 8) and y.dtype == torch.float16
