"""The prefill kernels of specialised warps: where they are used; the reference, on a machine of Python and on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from headway.core.ints import cdiv
from headway.kernels.hopper import runs_gluon
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.hopper.overlap import (
    BLOCK_M,
    LONG,
    NARROW,
    NARROW_STAGES,
    PAIRED_STAGES,
    SHORT,
    SHORT_KEYS,
    OverlapTile,
    choose_overlap,
    fits,
    launch_overlapped,
    launch_short,
    lies_flat,
    overlap_tile,
    short_stages,
)
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import DecodeRows
from headway.kernels.testing import PagedInputs, assert_close, make_paged_inputs

SMS = 132
Rows = list[tuple[int, int]]
Tile = OverlapTile | None
"""None: the short tile."""
NARROW_SHORT = OverlapTile(0, 0, True)
"""Stands for the short tile over 8-bit keys and values."""
Run = Callable[[PagedInputs, Tile], torch.Tensor]
PROMPTS: Rows = [(300, 300), (1, 1), (64, 64), (65, 65), (0, 0), (128, 128), (511, 511)]
CHUNKS: Rows = [(1, 70), (1, 0), (1, 301), (100, 357), (33, 1033), (5, 0), (129, 640), (2, 260)]
"""With decode rows before them and a zombie between them."""
SHAPES: list[tuple[tuple[int, int], int, dict[str, Any]]] = [
    ((32, 8), 128, {}),
    ((8, 8), 64, {"block_size": 8}),
    ((8, 1), 128, {"block_size": 64, "dtype": torch.float16}),
    ((4, 2), 64, {"block_size": 256}),
]


@pytest.fixture
def hopper() -> str:
    if not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    return "cuda"


def make(rows: Rows, heads: tuple[int, int] = (16, 8), size: int = 128, **changes: Any) -> PagedInputs:
    decode = next((i for i, (queries, _) in enumerate(rows) if queries != 1), len(rows)) if rows[0][0] == 1 else 0
    settings: dict[str, Any] = {"num_decode_rows": decode, "block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    return make_paged_inputs(rows, heads=heads, size=size, **{**settings, "heads_first": True, **changes})


def cache(tile: Tile) -> dict[str, Any]:
    """Of ``make``: what the tile is for."""
    return {"cached": torch.float8_e4m3fn} if tile in (NARROW, NARROW_SHORT) else {}


def is_short(tile: Tile) -> bool:
    return tile is None or tile == NARROW_SHORT


def counted(inputs: PagedInputs, bound: int) -> PagedInputs:
    """The same rows with a bound in place of the number of decode rows."""
    count = torch.tensor([inputs.num_decode_rows], dtype=torch.int32, device=inputs.q.device)
    return replace(inputs, num_decode_rows=bound, decode_rows=count)


def decode_rows(inputs: PagedInputs) -> int:
    """How many rows the decode kernel takes."""
    count = inputs.decode_rows
    return min(inputs.num_decode_rows, inputs.num_decode_rows if count is None else int(count))


def run(inputs: PagedInputs, tile: Tile) -> torch.Tensor:
    """The kernel's output over NaN, decode rows excepted."""
    out = torch.full_like(inputs.q, float("nan"))
    tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
    tensors, most = (inputs.q, inputs.k_cache, inputs.v_cache, out), inputs.max_query_len
    rows, first = DecodeRows(inputs.num_decode_rows, inputs.decode_rows), decode_rows(inputs)
    if is_short(tile):
        launch_short(*tensors, tables, 0.09, rows)
    else:
        assert tile is not None
        launch_overlapped(*tensors, tables, inputs.arrivals, 0.09, rows, most, tile)
    assert bool(out[:first].isnan().all()), "decode rows are not its business"
    assert not bool(inputs.arrivals.any())
    return out[first:]


def run_model(
    inputs: PagedInputs, tile: Tile, seed: int = 0, fault: Callable[[Any], None] = lambda names: None
) -> torch.Tensor:
    """The same on the machine of ``gluon_warps``: on three processors, which take the short tiles one after the other.

    ``fault`` changes the names the kernel's module sees.
    """
    gluon = pytest.importorskip("triton.experimental.gluon", reason="the kernels' modules import Gluon")
    assert gluon
    from headway.kernels.paged_attention.hopper import triton_prefill, triton_prefill8, triton_short, triton_short8
    from tests.kernels.gluon_pointer import Pointer
    from tests.kernels.gluon_warps import Descriptor, Machine

    q, cache, first, bound = inputs.q, inputs.k_cache, decode_rows(inputs), inputs.num_decode_rows
    rows = DecodeRows(bound, inputs.decode_rows)
    num_blocks, block_size, kv_heads, size = cache.shape
    group, num_rows = q.shape[1] // kv_heads, len(inputs.row_slots)
    page = (min(block_size, SHORT_KEYS if tile is None or is_short(tile) else tile.block_n), 64)
    flat = [x.as_strided((x.numel() // size, size), (size, 1)) for x in (cache, inputs.v_cache)]
    descriptors = [Descriptor(q, (64 // group, group, 64)), *(Descriptor(x, page) for x in flat)]
    out = torch.full_like(q, float("nan"))
    tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
    pointers = [Pointer(x.view(-1)) for x in (out, *tables)]
    count, counted = Pointer(rows.pointer(inputs.query_start)), inputs.decode_rows is not None
    sizes = (len(q), num_rows, bound, inputs.block_tables.shape[0], num_blocks, inputs.block_tables.shape[1])
    steps = (cache.stride(0) // size, cache.stride(2) // size)
    kind = (kv_heads, size, block_size)
    if tile is None or is_short(tile):
        module: Any = triton_short if tile is None else triton_short8
        name, stages = (
            ("short_prefill_kernel", PAIRED_STAGES) if tile is None else ("narrow_short_kernel", NARROW_STAGES)
        )
        programs = kv_heads * (rows.other_tokens(q) * group // 64 + num_rows - bound + 1)
        arguments = (
            *descriptors, *pointers, count, *sizes, 0.09, *steps, *kind, SHORT_KEYS, stages, counted, False,
        )  # fmt: skip
    else:
        module, name, programs = triton_prefill, "overlapped_prefill_kernel", 3
        if tile == NARROW:
            module, name = triton_prefill8, "narrow_prefill_kernel"
        units = kv_heads * (
            (num_rows - bound) * cdiv(inputs.max_query_len, BLOCK_M // group) + triton_prefill.PADS.value
        )
        counter = Pointer(inputs.arrivals.view(-1))
        arguments = (
            *descriptors,
            *pointers,
            counter,
            count,
            *sizes,
            units,
            0.09,
            *steps,
            *kind,
            *astuple(tile),
            counted,
        )
    for program in range(programs):
        machine = Machine(module, program, programs, seed + program)
        fault(machine.names)
        machine.names[name](*arguments)
    assert bool(out[:first].isnan().all()), "decode rows are not its business"
    return out[first:]


def check(inputs: PagedInputs, tile: Tile, run: Run = run, times: int = 5) -> None:
    exact = replace(inputs, num_decode_rows=decode_rows(inputs), decode_rows=None)  # done together
    arguments = exact.arguments(0.09)
    on_cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected = paged_attention.reference(*on_cpu)[decode_rows(inputs) :]
    outputs = [run(inputs, tile) for _ in range(times)]
    assert_close(outputs[0].cpu(), expected)
    for other in outputs[1:]:  # a moving result would be a race
        assert torch.equal(other, outputs[0])


@pytest.mark.parametrize("tile", [SHORT, LONG, NARROW, NARROW_SHORT, None])
@pytest.mark.parametrize("rows", [PROMPTS[:5], CHUNKS, [(1, 1)], [(200, 200)]])
def test_equals_reference_on_the_machine(rows: Rows, tile: Tile) -> None:
    inputs = make(rows, (4, 2), device="cpu", pad_rows=3, pad_tokens=300, bound=2048, **cache(tile))
    check(inputs, tile, run_model, 1)


@pytest.mark.parametrize("tile", [SHORT, NARROW, NARROW_SHORT, None])
@pytest.mark.parametrize(("bound", "pad_rows"), [(2, 0), (6, 3), (20, 17), (141, 138)])
def test_decode_rows_counted_on_the_device_on_the_machine(bound: int, pad_rows: int, tile: Tile) -> None:
    """Fewer than the bound, or more: those beyond it are prompts of one token then."""
    inputs = make(CHUNKS, (4, 2), device="cpu", pad_rows=pad_rows, pad_tokens=300, **cache(tile))
    check(counted(inputs, bound), tile, run_model, 1)


@pytest.mark.parametrize("tile", [SHORT, NARROW, NARROW_SHORT, None])
@pytest.mark.parametrize(("heads", "size", "changes"), SHAPES)
def test_heads_sizes_and_caches_on_the_machine(
    heads: tuple[int, int], size: int, changes: dict[str, Any], tile: Tile
) -> None:
    check(make([(70, 70), (20, 150)], heads, size, device="cpu", **changes, **cache(tile)), tile, run_model, 1)


@pytest.mark.parametrize("tile", [SHORT, NARROW, NARROW_SHORT, None])
@pytest.mark.parametrize("seed", range(3))
def test_the_machine_sees_what_is_not_fenced_or_waited_for(seed: int, tile: Tile) -> None:
    inputs = make([(130, 130), (70, 300)], (4, 2), device="cpu", **cache(tile))
    if not is_short(tile):  # a short tile's buffer of queries is never copied to again
        with pytest.raises(AssertionError, match="fenced"):
            run_model(inputs, tile, seed, lambda names: names.update(fence_async_shared=lambda: None))
    with pytest.raises(AssertionError, match=r"changed while it ran|more arrivals|not fenced"):
        run_model(inputs, tile, seed, lambda names: vars(names["mbarrier"]).update(wait=lambda barrier, phase: None))
    out = run_model(inputs, tile, seed, lambda names: names.update(clear_behind=lambda values, places: None))
    assert bool(out.isnan().any()), "values behind a row's end came through"


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [SHORT, LONG, NARROW, NARROW_SHORT, None])
def test_equals_reference(tile: Tile, hopper: str) -> None:
    for rows in (PROMPTS, CHUNKS, [(1, 1)], [(640, 640)], [(700, 700)] * 9):
        check(make(rows, pad_rows=3, pad_tokens=700, bound=2048, **cache(tile)), tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [SHORT, LONG, NARROW, NARROW_SHORT, None])
@pytest.mark.parametrize(("bound", "pad_rows"), [(2, 0), (6, 3), (20, 17), (448, 504)])
def test_decode_rows_counted_on_the_device(bound: int, pad_rows: int, tile: Tile, hopper: str) -> None:
    check(counted(make(CHUNKS, pad_rows=pad_rows, pad_tokens=700, bound=2048, **cache(tile)), bound), tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [SHORT, NARROW, NARROW_SHORT, None])
@pytest.mark.parametrize(("heads", "size", "changes"), SHAPES)
def test_heads_sizes_and_caches(
    heads: tuple[int, int], size: int, changes: dict[str, Any], tile: Tile, hopper: str
) -> None:
    check(make(PROMPTS[:4], heads, size, **changes, **cache(tile)), tile)
    check(make(CHUNKS, heads, size, **changes, **cache(tile)), tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [SHORT, NARROW, NARROW_SHORT, None])
def test_ids_outside_their_tables_are_harmless(tile: Tile, hopper: str) -> None:
    """Block ids outside the cache read block 0; a slot outside the table silences its row."""
    check(with_wrong_ids(make([(200, 300), (70, 70), (90, 90)], **cache(tile))), tile)


@pytest.mark.parametrize("tile", [SHORT, NARROW, NARROW_SHORT, None])
def test_ids_outside_their_tables_are_harmless_on_the_machine(tile: Tile) -> None:
    inputs = make([(200, 300), (70, 70), (90, 90)], (4, 2), device="cpu", **cache(tile))
    check(with_wrong_ids(inputs), tile, run_model, 1)


def with_wrong_ids(inputs: PagedInputs) -> PagedInputs:
    inputs.k_cache[0], inputs.v_cache[0] = 0.5, 2.0
    tables, slots = inputs.block_tables.clone(), inputs.row_slots.clone()
    tables[slots[0], 3], tables[slots[0], 17], tables[slots[1], 2] = -5, inputs.k_cache.shape[0], 2**31 - 1
    slots[2] = tables.shape[0]
    return replace(inputs, block_tables=tables, row_slots=slots)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_company(hopper: str) -> None:
    """Whatever stands before it in the batch, and whichever way units are dealt out."""
    batch = make([(130, 130), (300, 420), (64, 64)])
    first, last = batch.query_start[1:3].tolist()
    alone = replace(
        batch,
        q=batch.q[first:last],
        row_slots=batch.row_slots[1:2],
        query_start=torch.tensor([0, last - first], dtype=torch.int32, device="cuda"),
        seq_lens=batch.seq_lens[1:2],
    )
    for tile in (SHORT, None):
        assert torch.equal(run(batch, tile)[first:last], run(alone, tile))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "tile"),
    [([(1024, 1024)] * 4, SHORT), ([(1024, 1024)] * 4, NARROW), ([(512, 512)], NARROW_SHORT), ([(512, 512)], None)],
)
def test_the_op_uses_them(rows: Rows, tile: Tile, hopper: str) -> None:
    inputs = make(rows, on_device=True, **cache(tile))
    assert fits(inputs.q, inputs.k_cache, ScoreRule(0.09))
    chosen = choose_overlap(inputs.q, inputs.k_cache, DecodeRows(0), len(rows), rows[0][0])
    assert chosen == (None if is_short(tile) else tile)
    assert torch.equal(paged_attention(*inputs.arguments(0.09)), run(inputs, tile))


def test_used_where_they_are_ahead() -> None:
    assert overlap_tile((16, 8), 8192, 8, 1024, SMS) == SHORT
    assert overlap_tile((16, 8), 4096, 4, 1024, SMS) == SHORT
    assert overlap_tile((16, 8), 8192, 8, 1024, SMS, 1) == NARROW
    assert overlap_tile((32, 8), 8192, 1, 8192, SMS, 1) == NARROW
    assert overlap_tile((16, 8), 2048, 1, 2048, SMS) is None
    assert overlap_tile((16, 8), 2048, 1, 2048, SMS, 1) is None
    assert overlap_tile((32, 8), 8192, 1, 8192, SMS) == LONG
    assert overlap_tile((16, 8), 512, 1, 512, SMS) is None  # too little for two units a processor
    assert overlap_tile((16, 8), 8192, 250, 7000, SMS) is None  # most units would be empty
    assert overlap_tile((16, 8), 8192, 0, 0, SMS) is None  # padding alone


def test_few_short_tiles_have_a_processor_each() -> None:
    assert short_stages(128, SMS) > short_stages(133, SMS) > short_stages(133, SMS, narrow=True)


def flat_cache() -> torch.Tensor:
    return torch.zeros(4, 8, 16, 128, dtype=torch.bfloat16).transpose(1, 2)


def test_copies_need_heads_first_in_memory() -> None:
    assert lies_flat(flat_cache()) and lies_flat(flat_cache()[:, :, 2:4])
    assert not lies_flat(flat_cache().contiguous())


def test_not_used_off_hopper() -> None:
    assert not fits(torch.zeros(8192, 16, 128, dtype=torch.bfloat16), flat_cache(), ScoreRule(0.09))


def test_windows_caps_and_other_shapes_are_left_to_the_general_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.kernels.paged_attention.hopper.overlap.runs_gluon", lambda device: True)
    cache, numbers = flat_cache(), ScoreRule(0.09)

    def q(heads: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(64, heads, 128, dtype=dtype)

    assert fits(q(16), cache, numbers) and fits(q(16, torch.float16), cache.half(), numbers)
    assert fits(q(16), cache.to(torch.float8_e4m3fn), numbers) and not fits(q(16), cache.half(), numbers)
    assert not fits(q(16), cache, ScoreRule(0.09, 100)) and not fits(q(16), cache, ScoreRule(0.09, soft_cap=20.0))
    assert not fits(q(16), cache.contiguous(), numbers)
    assert not fits(q(16, torch.float32), cache, numbers)
    assert not fits(q(24), cache, numbers)  # three heads do not divide a warpgroup's rows
    assert not fits(q(1024), cache, numbers)
    assert not fits(torch.zeros(64, 16, 80, dtype=torch.bfloat16), cache, numbers)
