"""``paged_attention``: the reference against plain softmax over gathered keys, the kernels against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.launch import launch_decode
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import MAX_SPLITS, SPLIT_TOKENS, choose_splits, decode_tile
from headway.kernels.testing import (
    PagedInputs,
    assert_close,
    interpreter_loops,
    kernel_dtypes,
    make_paged_inputs,
    make_random,
)

DECODE = [(1, 1), (1, 37), (1, 0), (1, 130), (1, 64)]
MIXED = [(1, 70), (1, 0), (1, 9), (5, 5), (21, 71), (3, 0), (1, 40)]
PREFILL = [(40, 40), (1, 1), (4, 105)]


@pytest.fixture(autouse=True)
def loops() -> Iterator[None]:
    with interpreter_loops():
        yield


def make(rows: list[tuple[int, int]], device: str, **changes: Any) -> PagedInputs:
    settings: dict[str, Any] = {
        "num_decode_rows": next((i for i, (queries, _) in enumerate(rows) if queries > 1), len(rows)),
        "heads": (6, 2), "size": 16, "block_size": 8, "dtype": torch.float32,
    }  # fmt: skip
    return make_paged_inputs(rows, device=device, **{**settings, **changes})


def dense(
    inputs: PagedInputs,
    scale: float,
    window: int,
    soft_cap: float,
    chunk: int = 0,
    sinks: bool = False,
    slopes: bool = False,
) -> torch.Tensor:
    """One query and one head at a time, in f64, over keys gathered one by one."""
    q, group = inputs.q.cpu().double(), inputs.q.shape[1] // inputs.k_cache.shape[2]
    keys, values = inputs.k_cache.cpu().double(), inputs.v_cache.cpu().double()
    starts, lens = inputs.query_start.tolist(), inputs.seq_lens.tolist()
    out = torch.zeros_like(q)
    for row, slot in enumerate(inputs.row_slots.tolist()):
        for token in range(starts[row], starts[row + 1]):
            position = lens[row] - starts[row + 1] + token
            low = max(0, position - window + 1) if window else position - position % chunk if chunk else 0
            places = [divmod(p, keys.shape[1]) for p in range(low, position + 1)]
            if slot < 0 or lens[row] == 0:
                continue
            table = inputs.block_tables[slot].tolist()
            for head in range(q.shape[1]):
                k = torch.stack([keys[table[b], o, head // group] for b, o in places])
                v = torch.stack([values[table[b], o, head // group] for b, o in places])
                logits = k @ q[token, head] * scale
                if soft_cap:
                    logits = soft_cap * (logits / soft_cap).tanh()
                if slopes:
                    behind = torch.arange(low, position + 1).double() - position
                    logits = logits + by_head(inputs, 12).double()[head].cpu() * behind
                weights = logits.exp()
                sink = by_head(inputs, 11).double()[head].cpu().exp() if sinks else 0.0
                out[token, head] = (weights / (weights.sum() + sink)) @ v
    return out.to(inputs.q.dtype).to(inputs.q.device)


def expected(arguments: tuple[Any, ...]) -> torch.Tensor:
    """The reference's result, computed on the CPU: cuBLAS warns in the deterministic mode that poisons memory."""
    on_cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
    return paged_attention.reference(*on_cpu).to(arguments[0].device)


def by_head(inputs: PagedInputs, seed: int) -> torch.Tensor:
    """A number for each head, float32 [H]; no head has another one's, and none is zero."""
    drawn = make_random(inputs.q.shape[1], dtype=torch.float32, device=str(inputs.q.device), seed=seed)
    return drawn if seed == 11 else drawn.abs() / 4 + 0.01


def extras(inputs: PagedInputs, chunk: int, sinks: bool, slopes: bool) -> tuple[Any, ...]:
    return chunk, by_head(inputs, 11) if sinks else None, by_head(inputs, 12) if slopes else None


def check(
    inputs: PagedInputs,
    window: int = 0,
    soft_cap: float = 0.0,
    chunk: int = 0,
    sinks: bool = False,
    slopes: bool = False,
) -> None:
    """The kernel equals the reference and changes none of its inputs."""
    more = extras(inputs, chunk, sinks, slopes)
    arguments = inputs.arguments(inputs.q.shape[2] ** -0.5, window, soft_cap, *more)
    before = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
    actual = paged_attention.implementation("cuda")(*arguments)
    assert_close(actual, expected(arguments))
    after = [a for a in arguments if isinstance(a, torch.Tensor)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.float().nan_to_num(), new.float().nan_to_num())


@pytest.mark.parametrize("rows", [DECODE, MIXED, PREFILL])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (11, 0.0), (0, 2.0), (40, 1.5)])
def test_reference_is_dense_attention(rows: list[tuple[int, int]], window: int, soft_cap: float) -> None:
    inputs = make(rows, "cpu", pad_rows=2, pad_tokens=3, bound=150)
    actual = paged_attention.reference(*inputs.arguments(0.3, window, soft_cap))
    assert_close(actual, dense(inputs, 0.3, window, soft_cap))


KINDS: list[dict[str, Any]] = [
    {"sinks": True}, {"sinks": True, "window": 11}, {"chunk": 16}, {"chunk": 13}, {"chunk": 64, "sinks": True},
    {"slopes": True},
    {"slopes": True, "window": 20, "soft_cap": 1.5, "sinks": True},
]  # fmt: skip
"""Sinks, chunks and slopes, and what they meet."""


@pytest.mark.parametrize("rows", [DECODE, MIXED, PREFILL])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_reference_of_each_kind(rows: list[tuple[int, int]], kind: dict[str, Any]) -> None:
    inputs = make(rows, "cpu", pad_rows=2, pad_tokens=3, bound=150)
    kind = {"window": 0, "soft_cap": 0.0, "chunk": 0, "sinks": False, "slopes": False} | kind
    more = extras(inputs, kind["chunk"], kind["sinks"], kind["slopes"])
    actual = paged_attention.reference(*inputs.arguments(0.3, kind["window"], kind["soft_cap"], *more))
    assert_close(actual, dense(inputs, 0.3, **kind))


@pytest.mark.parametrize("rows", [DECODE, MIXED, PREFILL])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernel_of_each_kind(rows: list[tuple[int, int]], kind: dict[str, Any], device: str) -> None:
    check(make(rows, device, pad_rows=1, pad_tokens=2), **kind)
    cached = {"cached": torch.float8_e4m3fn, "size": 64}
    check(make(rows, device, dtype=torch.float16, heads_first=True, **cached), **kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_splits_of_each_kind(kind: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink is added once, however many splits a row has; a chunk's first key may lie in any of them."""
    monkeypatch.setattr("headway.kernels.paged_attention.launch.num_sms", lambda device: 132)
    many = {name: 20 * value if name in ("chunk", "window") else value for name, value in kind.items()}
    check(make([(1, 1100), (1, 40), (1, 0), (1, 640)], device, heads=(4, 2)), **many)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("rows", [DECODE, MIXED, PREFILL])
def test_kernel_equals_reference(rows: list[tuple[int, int]], dtype: torch.dtype, device: str) -> None:
    check(make(rows, device, dtype=dtype))


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("rows", [DECODE, MIXED, PREFILL])
@pytest.mark.parametrize(("window", "size"), [(0, 64), (11, 20), (7, 128)])
def test_cache_of_8_bit_floats(
    window: int, size: int, rows: list[tuple[int, int]], dtype: torch.dtype, device: str
) -> None:
    check(make(rows, device, dtype=dtype, size=size, cached=torch.float8_e4m3fn, pad_rows=1, pad_tokens=2), window)


def test_reference_reads_8_bit_floats_as_they_are(device: str) -> None:
    inputs = make(MIXED, "cpu", cached=torch.float8_e4m3fn)
    wide = replace(inputs, k_cache=inputs.k_cache.float(), v_cache=inputs.v_cache.float())
    actual, expected = (paged_attention.reference(*each.arguments(0.3)) for each in (inputs, wide))
    assert torch.equal(actual, expected)


def test_queries_beyond_f16_meet_8_bit_floats(device: str) -> None:
    """As factors beside 8-bit keys queries are f16: those of bf16 that are larger end at its largest, and give no NaN."""
    inputs = make([(1, 37), (5, 9)], device, dtype=torch.bfloat16, cached=torch.float8_e4m3fn)
    inputs.q[0, 0, 0] = 1e6
    out = paged_attention.implementation("cuda")(*inputs.arguments(1e-3))
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize(("heads", "size"), [((2, 2), 20), ((6, 2), 64), ((8, 1), 80), ((20, 1), 16)])
def test_heads_and_sizes(heads: tuple[int, int], size: int, dtype: torch.dtype, device: str) -> None:
    check(make([(1, 70), (1, 5), (9, 45)], device, heads=heads, size=size, dtype=dtype))


@pytest.mark.parametrize(("window", "block_size"), [(1, 8), (7, 16), (32, 8), (50, 64), (1000, 16)])
def test_windows_and_block_sizes(window: int, block_size: int, device: str) -> None:
    check(make([(1, 150), (1, 64), (1, 0), (40, 130), (3, 3)], device, block_size=block_size), window=window)


@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_cache_with_heads_first_in_memory(rows: list[tuple[int, int]], device: str) -> None:
    check(make(rows, device, heads_first=True))


@pytest.mark.parametrize("window", [0, 30])
def test_soft_cap(window: int, device: str) -> None:
    check(make(MIXED, device), window=window, soft_cap=0.7)


@pytest.mark.parametrize(
    ("rows", "pad_rows", "pad_tokens"),
    [(DECODE[:3], 2, 0), (DECODE[:3], 0, 5), (MIXED[-3:], 3, 40), (PREFILL[1:], 0, 1)],
)
def test_padding_gives_zeros(rows: list[tuple[int, int]], pad_rows: int, pad_tokens: int, device: str) -> None:
    inputs = make(rows, device, pad_rows=pad_rows, pad_tokens=pad_tokens)
    out = paged_attention.implementation("cuda")(*inputs.arguments(0.25))
    assert_close(out, expected(inputs.arguments(0.25)))
    assert not out[out.shape[0] - pad_tokens :].any()


def test_padded_decode_batch_of_a_graph(device: str) -> None:
    """Captured shape: every row is a decode row, the last rows and tokens are padding, the bound is large."""
    inputs = make(DECODE, device, pad_rows=3, pad_tokens=3, bound=500)
    inputs = replace(inputs, num_decode_rows=inputs.row_slots.shape[0])
    check(inputs, window=20)
    out = paged_attention.implementation("cuda")(*inputs.arguments(0.25))
    assert_close(out, expected(inputs.arguments(0.25)))
    assert not out[-3:].any()


COUNTED: list[tuple[list[tuple[int, int]], int, int, int]] = [
    (MIXED, 3, 0, 0), (MIXED, 1, 0, 3), (MIXED, 5, 2, 40), (PREFILL, 9, 9, 5), (DECODE, 9, 12, 3),
    ([(1, 700), (9, 30)], 70, 76, 1),
]  # fmt: skip
"""Rows, bound of decode rows, padding rows and tokens."""


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize(("rows", "bound", "pad_rows", "pad_tokens"), COUNTED)
def test_decode_rows_counted_on_the_device(
    rows: list[tuple[int, int]], bound: int, pad_rows: int, pad_tokens: int, dtype: torch.dtype, device: str
) -> None:
    """A captured shape: fewer decode rows than the bound has room for, or more."""
    inputs = make(rows, device, pad_rows=pad_rows, pad_tokens=pad_tokens, bound=800, dtype=dtype)
    count = torch.tensor([inputs.num_decode_rows], dtype=torch.int32, device=device)
    inputs = replace(inputs, num_decode_rows=bound, decode_rows=count)
    check(inputs)
    check(inputs, window=20, soft_cap=1.5)
    out = paged_attention.implementation("cuda")(*inputs.arguments(0.25))
    assert not out[out.shape[0] - pad_tokens :].any()


@pytest.mark.parametrize("many", [False, True])
def test_decode_programs_leave_rows_beyond_the_count_alone(many: bool, device: str) -> None:
    """Few are split and come first in the grid; many fill the device."""
    counted = (210 if device == "cuda" else 7) if many else 2  # the interpreter stands for a small device
    inputs = make([(1, 40), (1, 700), *[(1, 5)] * (counted - 2), (1, 30), (1, 9)], device, bound=800)
    out = torch.full_like(inputs.q, float("nan"))
    tables = (inputs.block_tables, inputs.row_slots, inputs.seq_lens)
    count = torch.tensor([counted], dtype=torch.int32, device=device)
    caches = (inputs.k_cache, inputs.v_cache)
    numbers = ScoreRule(0.25)
    launch_decode(inputs.q, *caches, out, inputs.arrivals, tables, numbers, len(out), 800, decode_rows=count)
    assert_close(out[:counted], expected(inputs.arguments(0.25))[:counted])
    assert bool(out[counted:].isnan().all()) and not inputs.arrivals.any()


def test_many_splits_are_weighed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than the reduction takes at a time, with weights that differ by orders of magnitude."""
    monkeypatch.setattr("headway.kernels.paged_attention.launch.num_sms", lambda device: 132)
    arguments = make([(1, 1100), (1, 40)], device, heads=(2, 1)).arguments(2.0)
    assert_close(paged_attention.implementation("cuda")(*arguments), expected(arguments))


def test_more_rows_than_one_search_step(device: str) -> None:
    """The padding tokens belong to the 257th entry of the row search; the pad rows own none."""
    arguments = make([(3, 9), (2, 2)], device, heads=(1, 1), pad_rows=254, pad_tokens=2).arguments(0.25)
    assert_close(paged_attention.implementation("cuda")(*arguments), expected(arguments))


def test_only_padding(device: str) -> None:
    inputs = make([], device, pad_rows=2, pad_tokens=2)
    for num_decode_rows in (0, 2):
        out = paged_attention.implementation("cuda")(*replace(inputs, num_decode_rows=num_decode_rows).arguments(0.25))
        assert out.shape == (2, 6, 16) and not out.any()


def test_ids_outside_their_tables_are_harmless(device: str) -> None:
    """Block ids outside the cache read block 0; a slot outside the table silences its row."""
    inputs = make([(1, 30), (1, 30), (4, 30), (4, 12)], device)
    inputs.k_cache[0], inputs.v_cache[0] = 0.5, 2.0
    tables, slots = inputs.block_tables.clone(), inputs.row_slots.clone()
    tables[slots[0], 1], tables[slots[2], 0], tables[slots[2], 2] = -5, inputs.k_cache.shape[0], 2**31 - 1
    slots[1], slots[3] = tables.shape[0], -2
    inputs = replace(inputs, block_tables=tables, row_slots=slots)
    check(inputs)
    out = paged_attention.implementation("cuda")(*inputs.arguments(0.25))
    assert not out[1].any() and not out[6:].any() and bool(out[:1].any())


def test_lengths_past_the_table_are_cut(device: str) -> None:
    inputs = make([(1, 32), (3, 32)], device)
    inputs.seq_lens.fill_(10_000)
    check(inputs)


def test_a_long_row_is_split_where_many_rows_fill_the_device(device: str) -> None:
    """Few reducing programs then serve all heads of a row; most have nothing to do."""
    others = 210 if device == "cuda" else 6  # the interpreter stands for a small device
    check(make([(1, 2 * SPLIT_TOKENS + 3), *[(1, 5)] * others], device, bound=2 * SPLIT_TOKENS + 8))


def test_no_tokens(device: str) -> None:
    inputs = make([], device)
    assert paged_attention.implementation("cuda")(*inputs.arguments(0.25)).shape == (0, 6, 16)


def test_result_does_not_depend_on_the_company(device: str) -> None:
    """A prefill row alone and in a batch: the same bits (R8). Decode rows may split differently: close."""
    kernel = paged_attention.implementation("cuda")
    batch = make(MIXED, device)
    out = kernel(*batch.arguments(0.25))
    for row in (2, 4):
        first, last = batch.query_start[row : row + 2].tolist()
        alone = replace(
            batch,
            q=batch.q[first:last],
            row_slots=batch.row_slots[row : row + 1],
            query_start=torch.tensor([0, last - first], dtype=torch.int32, device=device),
            seq_lens=batch.seq_lens[row : row + 1],
            num_decode_rows=int(row == 2),
        )
        assert_close(kernel(*alone.arguments(0.25)), out[first:last])


def test_meta_gives_shapes() -> None:
    inputs = make(MIXED, "cpu")
    arguments = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in inputs.arguments(0.25)]
    assert paged_attention(*arguments).shape == inputs.q.shape


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("bound", [64, 512, 4096, 40960])
def test_splits_fill_the_device_and_stay_few(rows: int, bound: int) -> None:
    sms, kv_heads = 132, 8
    splits, least = choose_splits(rows * kv_heads, bound, 64, sms)
    assert 1 <= splits <= MAX_SPLITS and splits <= max(1, bound // 64)
    if rows * kv_heads >= 3 * sms:
        assert least * 64 == SPLIT_TOKENS and splits <= max(1, bound // SPLIT_TOKENS)
    elif bound >= 40960:
        assert rows * kv_heads * splits >= 3 * sms


def test_tiles_fit_the_matrix_unit() -> None:
    for size in (16, 20, 64, 80, 96, 128, 256):
        for group in (1, 3, 8, 71):
            tile = decode_tile(size, group, torch.bfloat16)
            assert tile.block_d >= size and tile.block_m >= max(16, group)
