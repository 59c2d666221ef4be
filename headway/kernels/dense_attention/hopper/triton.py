"""``dense_attention`` in Gluon for Hopper: with a warp that copies, or by a warpgroup alone.

With one, the warpgroups' work is that of ``paged_attention``'s ``attend``, with a last query that sees all keys of its row.
Not the op's yet: ``bench/ops/dense_attention.py`` decides which form, if one, is to be.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headway.kernels.paged_attention.hopper.triton_prefill import LOG2E, attend, clear_behind, fold, hold

ROWS = gl.constexpr(64)
"""Queries of a warpgroup."""
ALIKE = gl.constexpr(256)
"""So many neighbouring queries see the same keys: all of a tile."""


@gluon.jit
def copy_row(q_desc, kv_desc, q_smem, k_smem, v_smem, bars, place, H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr):
    """The copying warp: a tile's queries, and keys and values in the slots that ``attend`` goes through."""
    q_full, _, full, empty = bars
    token, length, begin, head = place
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    GROUPS: gl.constexpr = q_smem.shape[0]
    if begin < length:
        last = (length - 1) // BLOCK_N
        mbarrier.expect(q_full, GROUPS * ROWS * D * 2)
        for group in gl.static_range(GROUPS):
            at = [token + begin + group * ROWS, head * D]
            tma.async_copy_global_to_shared(q_desc, at, q_full, q_smem.index(group))
        kv_head = head // (H // KH)
        for back in range(last + 2):
            stage = back % STAGES
            row = token + (last - back) * BLOCK_N
            mbarrier.wait(empty.index(stage), ((back // STAGES) & 1) ^ 1)
            if back <= last:
                mbarrier.expect(full.index(stage), BLOCK_N * D * 2)
                at = [row, (H + kv_head) * D]
                tma.async_copy_global_to_shared(kv_desc, at, full.index(stage), k_smem.index(stage))
            else:
                mbarrier.arrive(full.index(stage), count=1)
            if back > 0:
                mbarrier.expect(full.index(stage), BLOCK_N * D * 2)
                at = [row + BLOCK_N, (H + KH + kv_head) * D]
                tma.async_copy_global_to_shared(kv_desc, at, full.index(stage), v_smem.index(stage))
            else:
                mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def attend_row(
    out_ptr, q_smem, k_smem, v_smem, bars, scale, place, H: gl.constexpr, D: gl.constexpr, WHICH: gl.constexpr
):
    """A warpgroup: the output of its queries."""
    token, length, begin, head = place
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes of a head to a thread
    if begin < length:
        mbarrier.wait(bars[0], 0)
        o = attend(
            q_smem, k_smem, v_smem, bars, length - 1, (length - 1) // BLOCK_N, length, 0, scale * LOG2E, ALIKE, WHICH, True,
            S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        q_smem.index(WHICH).store(o.to(q_smem.dtype))  # taken; shared memory turns it for whole rows
        gl.thread_barrier()
        query = begin + WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
        at = gl.expand_dims((token + query).to(gl.int64) * (H * D) + head * D, 1)
        at = at + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, STORE)), 0)
        gl.store(out_ptr + at, q_smem.index(WHICH).load(STORE), mask=gl.expand_dims(query < length, 1))


@gluon.jit(do_not_specialize=["num_tokens"])
def dense_tiles_kernel(
    q_desc,  # [T, (H + 2 KH) * D] in blocks of [64, D]
    kv_desc,  # the same in blocks of [BLOCK_N, D]
    start_ptr,  # [R + 1]
    out_ptr,  # [T, H * D]
    num_tokens,
    scale,
    H: gl.constexpr,
    KH: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: tiles of GROUPS * 64 queries x heads x rows; one warpgroup here, a warp and perhaps another group beside it."""
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[1]
    BLOCK_N: gl.constexpr = kv_desc.block_shape[0]
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)  # nobody waits for it: there is one tile
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # keys and values
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    row = gl.program_id(2)
    token = gl.load(start_ptr + row)
    length = gl.minimum(gl.load(start_ptr + row + 1), num_tokens) - token
    place = (token, length, gl.program_id(0) * (GROUPS * ROWS), gl.program_id(1))
    bars = (q_full, q_empty, full, empty)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend_row, (out_ptr, q_smem, k_smem, v_smem, bars, scale, place, H, D, 0)),
                (attend_row, (out_ptr, q_smem, k_smem, v_smem, bars, scale, place, H, D, 1)),
                (copy_row, (q_desc, kv_desc, q_smem, k_smem, v_smem, bars, place, H, KH, D)),
            ],
            [4, 1],
            [(3 * REGISTERS - 32) // 16 * 8, 32],
        )
    else:
        gl.warp_specialize(
            [
                (attend_row, (out_ptr, q_smem, k_smem, v_smem, bars, scale, place, H, D, 0)),
                (copy_row, (q_desc, kv_desc, q_smem, k_smem, v_smem, bars, place, H, KH, D)),
            ],
            [1],
            [32],
        )


@gluon.jit
def copy_block(kv_desc, smem, full, back, last, token, column):
    """Start copying the keys or values of the tile that comes as number ``back``, if there is one."""
    STAGES: gl.constexpr = smem.shape[0]
    if back <= last:
        bar = full.index(back % STAGES)
        mbarrier.expect(bar, kv_desc.block_type.nbytes)
        at = [token + (last - back) * smem.shape[1], column]
        tma.async_copy_global_to_shared(kv_desc, at, bar, smem.index(back % STAGES))


@gluon.jit(do_not_specialize=["num_tokens"])
def dense_alone_kernel(
    q_desc,
    kv_desc,
    start_ptr,
    out_ptr,
    num_tokens,
    scale,
    H: gl.constexpr,
    KH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: tiles of 64 queries x heads x rows; a warpgroup copies ahead for itself."""
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[1]
    BLOCK_N: gl.constexpr = kv_desc.block_shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    head = gl.program_id(1)
    begin = gl.program_id(0) * ROWS
    token = gl.load(start_ptr + gl.program_id(2))
    length = gl.minimum(gl.load(start_ptr + gl.program_id(2) + 1), num_tokens) - token
    if begin < length:
        q_smem = gl.allocate_shared_memory(dtype, [ROWS, D], SHARED)
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
        v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
        fence_async_shared()
        last = (length - 1) // BLOCK_N
        key_column = (H + head // (H // KH)) * D
        value_column = key_column + KH * D
        mbarrier.expect(q_full, q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [token + begin, head * D], q_full, q_smem)
        for i in gl.static_range(STAGES):
            copy_block(kv_desc, k_smem, k_full, i, last, token, key_column)
            copy_block(kv_desc, v_smem, v_full, i, last, token, value_column)
        factor = scale * LOG2E
        o = gl.zeros([ROWS, D], gl.float32, layout=O_LAYOUT)
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        newest = gl.full([ROWS], length - 1, gl.int32, layout=gl.SliceLayout(1, S_LAYOUT))
        nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S_LAYOUT)
        mbarrier.wait(q_full, 0)
        q = q_smem
        if BLOCK_N == 64:  # there are registers for queries
            q = q_smem.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        mbarrier.wait(k_full.index(0), 0)
        s_later = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_later])
        gl.thread_barrier()
        copy_block(kv_desc, k_smem, k_full, STAGES, last, token, key_column)
        weights, total, top, _decay = fold(s, top, total, last * BLOCK_N, newest, factor, True, S_LAYOUT)
        p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(v_full.index(0), 0)
        if (last + 1) * BLOCK_N > length:
            clear_behind(v_smem.index(0), length - last * BLOCK_N)
        for back in range(1, last + 1):
            stage = back % STAGES
            before = (back - 1) % STAGES
            mbarrier.wait(k_full.index(stage), back // STAGES & 1)
            mbarrier.wait(v_full.index(before), (back - 1) // STAGES & 1)
            s_later = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            o_later = warpgroup_mma(p, v_smem.index(before), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_later])
            weights, total, top, decay = fold(s, top, total, 0, newest, factor, False, S_LAYOUT)
            p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
            total = hold(total)
            o = warpgroup_mma_wait(0, deps=[o_later])
            gl.thread_barrier()
            copy_block(kv_desc, k_smem, k_full, back + STAGES, last, token, key_column)
            copy_block(kv_desc, v_smem, v_full, back - 1 + STAGES, last, token, value_column)
            o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT)), 1)
        mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
        o_later = warpgroup_mma(p, v_smem.index(last % STAGES), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o_later])
        o = o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT)), 1)
        q_smem.store(o.to(dtype))
        gl.thread_barrier()
        query = begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
        at = gl.expand_dims((token + query).to(gl.int64) * (H * D) + head * D, 1)
        at = at + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, STORE)), 0)
        gl.store(out_ptr + at, q_smem.load(STORE), mask=gl.expand_dims(query < length, 1))
