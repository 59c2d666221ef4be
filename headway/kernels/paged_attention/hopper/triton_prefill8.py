"""Prefill attention for Hopper over keys and values of 8 bits (e4m3): ``triton_prefill`` with two warps more.

Products want both factors in 16 bits. So the copying warp fills rings of 8-bit tiles, two warps turn these into the 16-bit
tiles (f16, which holds every e4m3 number) that the warpgroups multiply, and queries become f16 on their way into registers. A
number is turned once for all 128 (queries x heads) of a unit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from headway.kernels.paged_attention.hopper.triton_prefill import PANEL, attend_units, copy_units, get_number, row_plan


@gluon.jit
def widen(narrow, wide):
    """A tile of 8-bit numbers as 16-bit ones, a panel at a time: 16 or 32 keys at a time wait longer for shared memory."""
    KEYS: gl.constexpr = narrow.shape[0]
    PANELS: gl.constexpr = narrow.shape[1] // PANEL
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    sources = narrow._reinterpret(narrow.dtype, [PANELS, KEYS, PANEL], gl.NVMMASharedLayout(64, 8, 2))  # noqa: SLF001
    targets = wide._reinterpret(wide.dtype, [PANELS, KEYS, PANEL], gl.NVMMASharedLayout(128, 16, 2))  # noqa: SLF001
    for panel in gl.static_range(PANELS):
        targets.index(panel).store(sources.index(panel).load(LAYOUT).to(wide.dtype))


@gluon.jit
def widen_slots(k_narrow, v_narrow, k_smem, v_smem, narrow_bars, bars, slot, last):
    """Keys and values of the slots from ``slot`` on that ``attend`` goes through; none for ``last`` below 0."""
    _, _, narrow_full, narrow_empty = narrow_bars
    _, _, full, empty = bars
    FROM: gl.constexpr = k_narrow.shape[0]
    TO: gl.constexpr = k_smem.shape[0]
    for back in range(gl.where(last < 0, 0, last + 2)):
        source = (slot + back) % FROM
        target = (slot + back) % TO
        mbarrier.wait(narrow_full.index(source), ((slot + back) // FROM) & 1)
        mbarrier.wait(empty.index(target), (((slot + back) // TO) & 1) ^ 1)
        if back <= last:
            widen(k_narrow.index(source), k_smem.index(target))
        if back > 0:
            widen(v_narrow.index(source), v_smem.index(target))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(target), count=1)
        mbarrier.arrive(narrow_empty.index(source), count=1)


@gluon.jit
def widen_units(k_narrow, v_narrow, k_smem, v_smem, narrow_bars, bars, numbers):
    """The turning warps: keys and values of all units of their program."""
    q_full, q_empty, _, _ = bars
    slot_count = 0
    units = 0
    mbarrier.wait(q_full, 0)
    last = get_number(numbers, 0)
    while last > -2:
        gl.thread_barrier()
        mbarrier.arrive(q_empty, count=1)
        widen_slots(k_narrow, v_narrow, k_smem, v_smem, narrow_bars, bars, slot_count, last)
        slot_count += gl.where(last < 0, 0, last + 2)
        units += 1
        mbarrier.wait(q_full, units & 1)
        last = get_number(numbers, 0)


@gluon.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_decode_rows", "num_blocks", "num_slots", "num_units"],
    do_not_specialize_on_alignment=[
        "counter_ptr",
        "row_slots_ptr",
        "query_start_ptr",
        "seq_lens_ptr",
        "tables_ptr",
        "decode_rows_ptr",
    ],
)
def narrow_prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, tables_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, counter_ptr,
    decode_rows_ptr, num_tokens, num_rows, num_decode_rows, num_slots, num_blocks, table_width, num_units, scale,
    block_rows, head_rows,
    KH: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, KEPT: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """Arguments and grid of ``overlapped_prefill_kernel``; STAGES tiles of 16 bits and as many of 8, queries always KEPT."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    GROUP: gl.constexpr = q_desc.block_type.shape[1]
    QUERIES: gl.constexpr = q_desc.block_type.shape[0] * GROUP
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, QUERIES, D], SHARED)
    o_smem = gl.allocate_shared_memory(q_desc.dtype, [2, QUERIES, D], SHARED)
    k_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D], SHARED)
    k_narrow = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], NARROW)
    v_narrow = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], NARROW)
    numbers = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    narrow_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    narrow_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=3)  # both warpgroups and the turning warps
    for stage in gl.static_range(STAGES):
        mbarrier.init(narrow_full.index(stage), count=2)  # keys and values
        mbarrier.init(narrow_empty.index(stage), count=1)
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both warpgroups
    fence_async_shared()
    bars = (q_full, q_empty, full, empty)
    narrow_bars = (q_full, q_empty, narrow_full, narrow_empty)
    plan = row_plan(
        query_start_ptr, row_slots_ptr, seq_lens_ptr, decode_rows_ptr, num_tokens, num_rows, num_decode_rows, num_slots,
        table_width, BS, COUNTED,
    )  # fmt: skip
    cache = (num_blocks, table_width, block_rows, head_rows)
    gl.warp_specialize(
        [
            (attend_units, (out_ptr, q_smem, o_smem, k_smem, v_smem, bars, numbers, scale, GROUP, KH, 0, KEPT)),
            (attend_units, (out_ptr, q_smem, o_smem, k_smem, v_smem, bars, numbers, scale, GROUP, KH, 1, KEPT)),
            (widen_units, (k_narrow, v_narrow, k_smem, v_smem, narrow_bars, bars, numbers)),
            (copy_units, (q_desc, k_desc, v_desc, q_smem, k_narrow, v_narrow, narrow_bars, numbers, tables_ptr,
                          counter_ptr, cache, plan, num_units, GROUP, KH, D, BS, BLOCK_N)),
        ],
        [4, 2, 1],
        [208, 88, 88],  # registers a thread; the last two share a warpgroup
    )  # fmt: skip
