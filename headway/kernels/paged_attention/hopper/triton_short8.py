"""Attention of short prompts over keys and values of 8 bits: ``triton_short`` with the turning warps of ``triton_prefill8``."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from headway.kernels.paged_attention.hopper.triton_prefill import row_plan, tile_bounds
from headway.kernels.paged_attention.hopper.triton_prefill8 import widen_slots
from headway.kernels.paged_attention.hopper.triton_short import attend_tile, copy_tile, find_tile


@gluon.jit
def widen_tile(k_narrow, v_narrow, k_smem, v_smem, narrow_bars, bars, unit, SHARE: gl.constexpr):
    """The turning warps: a tile's keys and values."""
    _, num_queries, _, seq_len, tile = unit
    _, last = tile_bounds(tile, num_queries, seq_len, SHARE, k_smem.shape[1])
    last = gl.where((tile >= 0) & (seq_len > 0), last, -1)
    widen_slots(k_narrow, v_narrow, k_smem, v_smem, narrow_bars, bars, 0, last)


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
def narrow_short_kernel(
    q_desc, k_desc, v_desc, out_ptr, tables_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, decode_rows_ptr, num_tokens,
    num_rows, num_decode_rows, num_slots, num_blocks, table_width, scale, block_rows, head_rows,
    KH: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    COUNTED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Arguments and grid of ``short_prefill_kernel``; STAGES tiles of 16 bits and as many of 8."""
    if EARLY:
        gdc_launch_dependents()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    GROUP: gl.constexpr = q_desc.block_type.shape[1]
    ROWS: gl.constexpr = q_desc.block_type.shape[0] * GROUP
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [1, ROWS, D], SHARED)
    k_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D], SHARED)
    k_narrow = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], NARROW)
    v_narrow = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], NARROW)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    narrow_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    narrow_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)  # nobody waits for it: there is one tile
    for stage in gl.static_range(STAGES):
        mbarrier.init(narrow_full.index(stage), count=2)  # keys and values
        mbarrier.init(narrow_empty.index(stage), count=1)
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    bars = (q_full, q_empty, full, empty)
    narrow_bars = (q_full, q_empty, narrow_full, narrow_empty)
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
            (widen_tile, (k_narrow, v_narrow, k_smem, v_smem, narrow_bars, bars, unit, ROWS // GROUP)),
            (copy_tile, (q_desc, k_desc, v_desc, q_smem, k_narrow, v_narrow, narrow_bars, tables_ptr, cache, unit, kv_head,
                         GROUP, D, BS, BLOCK_N, EARLY)),
        ],
        [2, 1],
        [64, 64],  # registers a thread of the last two, which share a warpgroup; the first gets what they leave
    )  # fmt: skip
