"""Prefill attention for Hopper where there is little to do: a tile of 64 (queries x heads of one KV head) to a program.

``triton_prefill`` gives 128 to a program that stays, which leaves most processors without work when one prompt of a few hundred
tokens is alone. Here a warp copies and one warpgroup multiplies and folds as there, two programs share a processor, and a
program finds its tile by itself before the kernel ahead of it has ended.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.paged_attention.hopper.triton_prefill import (
    LOG2E,
    PANEL,
    attend,
    copy_pages,
    find_pages,
    row_plan,
    tile_bounds,
)

SEARCH = gl.constexpr(128)
"""Rows that are looked at together."""


@gluon.jit
def find_tile(number, plan, BLOCK_Q: gl.constexpr):
    """(first token, queries, slot, context, tile) of a flat tile number; tile -1: there is none.

    Of the ``most_rows`` rows from ``first_row`` on, the i-th owns the numbers from (its first token - first_row) // BLOCK_Q + i
    on: at least as many as it needs, and no two rows overlap. Its latest tiles, which see most keys, come first. The padding
    behind the rows comes after all of them, as row ``num_rows``. Context 0: the tile is zeros.
    """
    query_start_ptr, row_slots_ptr, seq_lens_ptr, num_tokens, num_rows, first_row, most_rows, num_slots, capacity = plan
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    count = 0
    for start in range(0, most_rows + 1, SEARCH):
        i = start + gl.arange(0, SEARCH, layout=LAYOUT)
        rows = gl.where(i < most_rows, first_row + i, num_rows)
        before = gl.maximum(gl.load(query_start_ptr + rows, mask=i <= most_rows, other=0) - first_row, 0)
        begun = (i <= most_rows) & (before // BLOCK_Q + i <= number)
        count += gl.sum(begun.to(gl.int32), axis=0)
    index = gl.maximum(count - 1, 0)
    row = gl.where(index < most_rows, first_row + index, num_rows)
    has_row = row < num_rows
    token = gl.maximum(gl.load(query_start_ptr + row), 0)
    token_end = gl.load(query_start_ptr + row + 1, mask=has_row, other=num_tokens)
    slot = gl.load(row_slots_ptr + row, mask=has_row, other=-1)
    seq_len = gl.load(seq_lens_ptr + row, mask=has_row, other=0)
    num_queries = gl.minimum(token_end, num_tokens) - token
    known = (slot >= 0) & (slot < num_slots)
    seq_len = gl.where(known, gl.minimum(seq_len, capacity), 0)
    seq_len = gl.where(seq_len < num_queries, 0, seq_len)
    first = gl.maximum(token - first_row, 0) // BLOCK_Q + index
    tile = gl.maximum((num_queries + BLOCK_Q - 1) // BLOCK_Q - 1 - (number - first), -1)
    return token, num_queries, gl.where(known, slot, 0), seq_len, tile


@gluon.jit
def copy_tile(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tables_ptr, cache, unit, kv_head,
    GROUP: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, BLOCK_N: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp: a tile's queries, and keys and values in the slots that ``attend`` goes through."""
    token, num_queries, slot, seq_len, tile = unit
    q_full, _, full, empty = bars
    STAGES: gl.constexpr = k_smem.shape[0]
    SHARE: gl.constexpr = q_smem.shape[1] // GROUP
    PANELS: gl.constexpr = D // PANEL
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    _, last = tile_bounds(tile, num_queries, seq_len, SHARE, BLOCK_N)
    last = gl.where((tile >= 0) & (seq_len > 0), last, -2)
    table = tables_ptr + slot.to(gl.int64) * cache[1]
    rows = find_pages(table, last, cache, kv_head, seq_len, BS, BLOCK_N)
    # Not ``rows``: Triton 3.6 would take two names of one value for one, in all turns of the loop.
    rows_before = find_pages(table, -1, cache, kv_head, seq_len, BS, BLOCK_N)
    if EARLY:
        gdc_wait()
    if last >= 0:
        mbarrier.expect(q_full, PANELS * q_desc.block_type.nbytes)
        places = q_smem.index(0)._reinterpret(q_desc.dtype, [PANELS, SHARE, GROUP, PANEL], LAYOUT)  # noqa: SLF001
        for panel in gl.static_range(PANELS):
            begin = [token + tile * SHARE, kv_head * GROUP, panel * PANEL]
            tma.async_copy_global_to_shared(q_desc, begin, q_full, places.index(panel))
    for back in range(last + 2):
        stage = back % STAGES
        mbarrier.wait(empty.index(stage), ((back // STAGES) & 1) ^ 1)
        if back <= last:
            copy_pages(k_desc, k_smem.index(stage), rows, full.index(stage), D, BLOCK_N)
        else:
            mbarrier.arrive(full.index(stage), count=1)
        if back > 0:
            copy_pages(v_desc, v_smem.index(stage), rows_before, full.index(stage), D, BLOCK_N)
        else:
            mbarrier.arrive(full.index(stage), count=1)
        rows_before = rows
        rows = find_pages(table, last - back - 1, cache, kv_head, seq_len, BS, BLOCK_N)


@gluon.jit
def attend_tile(
    out_ptr, q_smem, k_smem, v_smem, bars, scale, unit, kv_head, GROUP: gl.constexpr, KH: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The warpgroup: a tile's output."""
    token, num_queries, _, seq_len, tile = unit
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    ROWS: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    BLOCK_Q: gl.constexpr = ROWS // GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes of a head to a thread
    if EARLY:
        gdc_wait()
    member = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    query = tile * BLOCK_Q + member // GROUP
    head = (kv_head * GROUP + member % GROUP) * D
    place = gl.expand_dims((token + query).to(gl.int64) * (KH * GROUP * D) + head, 1)
    place = place + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, STORE)), 0)
    keep = gl.expand_dims((tile >= 0) & (query < num_queries), 1)
    if (tile >= 0) & (seq_len > 0):
        position, last = tile_bounds(tile, num_queries, seq_len, BLOCK_Q, BLOCK_N)
        mbarrier.wait(bars[0], 0)
        o = attend(
            q_smem, k_smem, v_smem, bars, position, last, seq_len, 0, scale * LOG2E, GROUP, 0, True, S_LAYOUT, O_LAYOUT
        )
        q_smem.index(0).store(o.to(q_smem.dtype))  # all have taken their queries; shared memory turns it for whole rows
        gl.thread_barrier()
        gl.store(out_ptr + place, q_smem.index(0).load(STORE), mask=keep)
    else:
        gl.store(out_ptr + place, gl.zeros([ROWS, D], q_smem.dtype, layout=STORE), mask=keep)


@gluon.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_decode_rows", "num_blocks", "num_slots"],
    do_not_specialize_on_alignment=[
        "row_slots_ptr",
        "query_start_ptr",
        "seq_lens_ptr",
        "tables_ptr",
        "decode_rows_ptr",
    ],
)
def short_prefill_kernel(
    q_desc,  # [T, H, D] in blocks of [queries of a tile, GROUP, 64]
    k_desc,  # [rows of a head, D] in blocks of [keys of a page, 64]
    v_desc,
    out_ptr,  # [T, H, D]
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    decode_rows_ptr,  # [1], with COUNTED
    num_tokens,
    num_rows,
    num_decode_rows,  # leading rows of one token each, for another kernel; at most, with COUNTED
    num_slots,
    num_blocks,
    table_width,
    scale,
    block_rows,  # rows of k_desc from block to block
    head_rows,  # and from head to head
    KH: gl.constexpr,
    D: gl.constexpr,
    BS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    COUNTED: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: KV heads x flat tile numbers, see ``find_tile``; one warpgroup here and a warp beside it."""
    if EARLY:
        gdc_launch_dependents()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q_desc.dtype
    GROUP: gl.constexpr = q_desc.block_type.shape[1]
    ROWS: gl.constexpr = q_desc.block_type.shape[0] * GROUP
    q_smem = gl.allocate_shared_memory(dtype, [1, ROWS, D], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)  # nobody waits for it: there is one tile
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # keys and values
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    bars = (q_full, q_empty, full, empty)
    plan = row_plan(
        query_start_ptr, row_slots_ptr, seq_lens_ptr, decode_rows_ptr, num_tokens, num_rows, num_decode_rows, num_slots,
        table_width, BS, COUNTED,
    )  # fmt: skip
    cache = (num_blocks, table_width, block_rows, head_rows)
    kv_head = gl.program_id(0) % KH
    unit = find_tile(gl.program_id(0) // KH, plan, ROWS // GROUP)
    gl.warp_specialize(
        [
            (attend_tile, (out_ptr, q_smem, k_smem, v_smem, bars, scale, unit, kv_head, GROUP, KH, EARLY)),
            (copy_tile, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, tables_ptr, cache, unit, kv_head,
                         GROUP, D, BS, BLOCK_N, EARLY)),
        ],
        [1],
        [56],  # registers a thread of the copying warp; the others get what it leaves
    )  # fmt: skip
