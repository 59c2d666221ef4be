"""``dense_attention`` in Gluon for Hopper: the scores' softmax runs beside the values' product.

A warpgroup takes 64 queries of a head and goes through their row's keys in tiles of 64, the last tile first: it alone is
masked. It copies ahead for itself; four programs share an SM, so that one multiplies while others wait.
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

from headway.kernels.paged_attention.hopper.triton_prefill import LOG2E, clear_behind, fold, hold

ROWS = gl.constexpr(64)
"""Queries of a program, and keys of a tile."""
STAGES = gl.constexpr(2)
"""Tiles of keys, and as many of values, that there is memory for."""


@gluon.jit
def copy_tile(qkv_desc, smem, full, back, last, token, column):
    """Start copying the keys or values of the tile that comes as number ``back``, if there is one."""
    if back <= last:
        bar = full.index(back % STAGES)
        mbarrier.expect(bar, qkv_desc.block_type.nbytes)
        at = [token + (last - back) * ROWS, column]
        tma.async_copy_global_to_shared(qkv_desc, at, bar, smem.index(back % STAGES))


@gluon.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["start_ptr"])
def overlapped_dense_kernel(
    qkv_desc,  # [T, (H + 2 KH) * D] in blocks of [ROWS, D]
    start_ptr,  # [R + 1]
    out_ptr,  # [T, H * D]
    num_tokens,
    scale,
    H: gl.constexpr,
    KH: gl.constexpr,
):
    """Grid: tiles of ROWS queries x heads x rows; 4 warps."""
    dtype: gl.constexpr = qkv_desc.dtype
    D: gl.constexpr = qkv_desc.block_shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    head = gl.program_id(1)
    begin = gl.program_id(0) * ROWS
    token = gl.load(start_ptr + gl.program_id(2))
    length = gl.minimum(gl.load(start_ptr + gl.program_id(2) + 1), num_tokens) - token
    if begin < length:
        q_smem = gl.allocate_shared_memory(dtype, [ROWS, D], SHARED)
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], SHARED)
        v_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], SHARED)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
        fence_async_shared()
        last = (length - 1) // ROWS
        key_column = (H + head // (H // KH)) * D
        value_column = key_column + KH * D
        mbarrier.expect(q_full, qkv_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(qkv_desc, [token + begin, head * D], q_full, q_smem)
        for i in gl.static_range(STAGES):
            copy_tile(qkv_desc, k_smem, k_full, i, last, token, key_column)
            copy_tile(qkv_desc, v_smem, v_full, i, last, token, value_column)
        factor = scale * LOG2E
        o = gl.zeros([ROWS, D], gl.float32, layout=O_LAYOUT)
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        newest = gl.full([ROWS], length - 1, gl.int32, layout=gl.SliceLayout(1, S_LAYOUT))
        nothing = gl.zeros([ROWS, ROWS], gl.float32, layout=S_LAYOUT)
        mbarrier.wait(q_full, 0)
        q = q_smem.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        mbarrier.wait(k_full.index(0), 0)
        s_later = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_later])
        gl.thread_barrier()
        copy_tile(qkv_desc, k_smem, k_full, STAGES, last, token, key_column)
        weights, total, top, _decay = fold(s, top, total, last * ROWS, newest, factor, True, S_LAYOUT)
        p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(v_full.index(0), 0)
        if (last + 1) * ROWS > length:
            clear_behind(v_smem.index(0), length - last * ROWS)
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
            copy_tile(qkv_desc, k_smem, k_full, back + STAGES, last, token, key_column)
            copy_tile(qkv_desc, v_smem, v_full, back - 1 + STAGES, last, token, value_column)
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
