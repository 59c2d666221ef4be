"""The overlapped prefill kernel: where it is used, and on a Hopper GPU against the reference (no interpreter runs Gluon)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.kernels.hopper import runs_gluon
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.overlap import (
    OverlapTile,
    choose_overlap,
    launch_overlapped,
    overlap_tile,
)
from headway.kernels.testing import PagedInputs, assert_close, make_paged_inputs

SMS = 132
Rows = list[tuple[int, int]]
PROMPTS: Rows = [(300, 300), (1, 1), (64, 64), (65, 65), (0, 0), (128, 128), (511, 511)]
CHUNKS: Rows = [(1, 70), (1, 0), (1, 301), (100, 357), (33, 1033), (5, 0), (129, 640), (2, 260)]
"""With decode rows before them and a zombie between them."""


@pytest.fixture
def hopper() -> str:
    if not runs_gluon(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper's warpgroup products")
    return "cuda"


def make(rows: Rows, heads: tuple[int, int] = (16, 8), size: int = 128, **changes: Any) -> PagedInputs:
    decode = next((i for i, (queries, _) in enumerate(rows) if queries != 1), len(rows)) if rows[0][0] == 1 else 0
    settings: dict[str, Any] = {"num_decode_rows": decode, "block_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    return make_paged_inputs(rows, heads=heads, size=size, **{**settings, "heads_first": True, **changes})


def run(inputs: PagedInputs, tile: OverlapTile) -> torch.Tensor:
    """The kernel's output over NaN, decode rows excepted."""
    out = torch.full_like(inputs.q, float("nan"))
    tables = (inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens)
    first, most = inputs.num_decode_rows, inputs.max_query_len
    launch_overlapped(inputs.q, inputs.k_cache, inputs.v_cache, out, tables, 0.09, first, most, tile)
    assert bool(out[:first].isnan().all()), "decode rows are not its business"
    return out[first:]


def check(inputs: PagedInputs, tile: OverlapTile) -> None:
    arguments = inputs.arguments(0.09)
    on_cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected = paged_attention.reference(*on_cpu)[inputs.num_decode_rows :]
    outputs = [run(inputs, tile) for _ in range(5)]
    assert_close(outputs[0].cpu(), expected)
    for other in outputs[1:]:  # a moving result would be a race
        assert torch.equal(other, outputs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("most_tiles", [1, 2])
@pytest.mark.parametrize("block_n", [64, 128])
def test_equals_reference(block_n: int, most_tiles: int, hopper: str) -> None:
    tile = OverlapTile(block_n, most_tiles)
    for rows in (PROMPTS, CHUNKS, [(1, 1)], [(640, 640)]):
        check(make(rows, pad_rows=3, pad_tokens=700, bound=2048), tile)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "size", "changes"),
    [
        ((32, 8), 128, {}),
        ((8, 8), 64, {"block_size": 8}),
        ((8, 1), 128, {"block_size": 64, "dtype": torch.float16}),
        ((4, 2), 64, {"block_size": 256, "heads_first": False}),
    ],
)
def test_heads_sizes_and_caches(heads: tuple[int, int], size: int, changes: dict[str, Any], hopper: str) -> None:
    check(make(PROMPTS[:4], heads, size, **changes), OverlapTile(128, 2))
    check(make(CHUNKS, heads, size, **changes), OverlapTile(128, 2))


@pytest.mark.gpu
def test_ids_outside_their_tables_are_harmless(hopper: str) -> None:
    """Block ids outside the cache read block 0; a slot outside the table silences its row."""
    inputs = make([(200, 300), (70, 70), (90, 90)])
    inputs.k_cache[0], inputs.v_cache[0] = 0.5, 2.0
    tables, slots = inputs.block_tables.clone(), inputs.row_slots.clone()
    tables[slots[0], 3], tables[slots[0], 17], tables[slots[1], 2] = -5, inputs.k_cache.shape[0], 2**31 - 1
    slots[2] = tables.shape[0]
    check(replace(inputs, block_tables=tables, row_slots=slots), OverlapTile(128, 2))


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_company(hopper: str) -> None:
    """Whatever stands before it in the batch, and whichever way tiles are paired."""
    tile = OverlapTile(128, 2)
    batch = make([(130, 130), (300, 420), (64, 64)])
    first, last = batch.query_start[1:3].tolist()
    alone = replace(
        batch,
        q=batch.q[first:last],
        row_slots=batch.row_slots[1:2],
        query_start=torch.tensor([0, last - first], dtype=torch.int32, device="cuda"),
        seq_lens=batch.seq_lens[1:2],
    )
    assert torch.equal(run(batch, tile)[first:last], run(alone, OverlapTile(128, 1)))


@pytest.mark.gpu
def test_the_op_uses_it_for_long_prompts(hopper: str) -> None:
    inputs = make([(1024, 1024)] * 4, on_device=True)
    arguments = inputs.arguments(0.09)
    tile = choose_overlap(inputs.q, inputs.k_cache, (0.09, 0, 0.0), 0, 4, 1024)
    assert tile is not None
    assert torch.equal(paged_attention(*arguments), run(inputs, tile))


def test_used_where_it_fits() -> None:
    def tile(heads: tuple[int, int], size: int, tokens: int, rows: int, most: int) -> OverlapTile | None:
        return overlap_tile(heads, size, torch.bfloat16, tokens, rows, most, SMS)

    assert tile((16, 8), 128, 8192, 8, 1024) == OverlapTile(128, 2)
    assert tile((16, 8), 128, 2048, 2, 1024) == OverlapTile(128, 1)
    assert tile((32, 8), 64, 8192, 1, 8192) == OverlapTile(128, 2)
    assert tile((16, 8), 128, 512, 1, 512) is None  # too little for one program a processor
    assert tile((16, 8), 80, 8192, 8, 1024) is None
    assert tile((24, 8), 128, 8192, 8, 1024) is None  # three heads do not divide a tile
    assert tile((16, 8), 128, 8192, 250, 7000) is None  # most programs would have nothing to do
    assert overlap_tile((16, 8), 128, torch.float32, 8192, 8, 1024, SMS) is None


def test_not_used_off_hopper_or_with_windows_and_caps() -> None:
    q, cache = torch.zeros(8192, 16, 128, dtype=torch.bfloat16), torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    assert choose_overlap(q, cache, (0.09, 0, 0.0), 0, 8, 1024) is None


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (0, 20.0)])
def test_windows_and_caps_are_left_to_the_general_kernel(
    window: int, soft_cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.kernels.paged_attention.overlap.runs_gluon", lambda device: True)
    monkeypatch.setattr("headway.kernels.paged_attention.overlap.num_sms", lambda device: SMS)
    q, cache = torch.zeros(8192, 16, 128, dtype=torch.bfloat16), torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    plain = window == 0 and soft_cap == 0
    assert (choose_overlap(q, cache, (0.09, window, soft_cap), 0, 8, 1024) is not None) == plain
    assert choose_overlap(q, cache, (0.09, window, soft_cap), 8, 8, 1) is None  # decode rows alone
