"""The Gluon kernel of gate, up and activation in tiles of 128 tokens x 192 weight rows, where others leave SMs idle.

A tensor's sides are powers of two, so a tile is two products that share their activations: of 128 weight rows and of 64. Its
producer warp is that of ``triton``. Those who multiply also finish: a program has a tile or two at the sizes it is used for.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.wide_linear.hopper.triton import BLOCK_K, BLOCK_M, ROWS, gate_mul, halves, tile_place

LEFT = gl.constexpr(64)
RIGHT = gl.constexpr(32)
"""Outputs of the two products of a tile."""


@gluon.jit
def copy_weights(left_desc, right_desc, left_smem, right_smem, bar, stage, n, at):
    """Start copying a chunk of gate and up rows."""
    mbarrier.expect(bar, 2 * BLOCK_K * (BLOCK_M + 2 * LEFT + 2 * RIGHT))
    first = n * (LEFT + RIGHT)
    tma.async_copy_global_to_shared(left_desc, [0, first, at], bar, left_smem.index(stage))
    tma.async_copy_global_to_shared(right_desc, [0, first + LEFT, at], bar, right_smem.index(stage))


@gluon.jit
def copy_pairs(
    x_desc, left_desc, right_desc, x_smem, left_smem, right_smem, ready, free, tiles_m, tiles_n, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    CHUNKS: gl.constexpr = K // BLOCK_K
    AHEAD: gl.constexpr = STAGES if STAGES < CHUNKS else CHUNKS
    m_first, n_first = tile_place(gl.program_id(0), tiles_m, tiles_n, GROUP)
    for i in gl.static_range(AHEAD):  # what needs nothing of the kernel ahead
        copy_weights(left_desc, right_desc, left_smem, right_smem, ready.index(i), i, n_first, i * BLOCK_K)
    if EARLY:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        begin = [m_first * BLOCK_M, i * BLOCK_K]
        tma.async_copy_global_to_shared(x_desc, begin, ready.index(i), x_smem.index(i))
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        for chunk in range(CHUNKS):
            if count >= AHEAD:
                stage = count % STAGES
                bar = ready.index(stage)
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                copy_weights(left_desc, right_desc, left_smem, right_smem, bar, stage, n, chunk * BLOCK_K)
                tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, chunk * BLOCK_K], bar, x_smem.index(stage))
            count += 1


@gluon.jit
def store_part(desc, smem, y, row, column):
    """Copy a part of a tile out; ``smem`` has been read by the copy before."""
    smem.store(y)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, column], smem)


@gluon.jit
def pair_tiles(
    out_left, out_right, x_smem, left_smem, right_smem, y_left, y_right, ready, free, tiles_m, tiles_n,
    K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr, HALF: gl.constexpr,
    GATE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows HALF * ROWS to HALF * ROWS + ROWS of each tile."""
    dtype: gl.constexpr = x_smem.dtype
    LEFT_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * LEFT, 16])
    RIGHT_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * RIGHT, 16])
    if EARLY:
        gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        left = gl.zeros([ROWS, 2 * LEFT], gl.float32, layout=LEFT_ACC)
        right = gl.zeros([ROWS, 2 * RIGHT], gl.float32, layout=RIGHT_ACC)
        for chunk in range(K // BLOCK_K):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            a = x_smem.index(stage).slice(HALF * ROWS, ROWS)
            left_b = left_smem.index(stage).reshape([2 * LEFT, BLOCK_K]).permute((1, 0))
            right_b = right_smem.index(stage).reshape([2 * RIGHT, BLOCK_K]).permute((1, 0))
            left = warpgroup_mma(a, left_b, left, use_acc=chunk > 0, is_async=True)
            right = warpgroup_mma(a, right_b, right, use_acc=chunk > 0, is_async=True)
            left, right = warpgroup_mma_wait(2, deps=[left, right])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=chunk > 0)
            count += 1
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        gate, up = halves(left, LEFT)
        left_y = gate_mul(gate, up, dtype, GATE)
        gate, up = halves(right, RIGHT)
        right_y = gate_mul(gate, up, dtype, GATE)
        tma.store_wait(0)
        gl.thread_barrier()  # the copies out of the tile before have read it
        row = m * BLOCK_M + HALF * ROWS
        store_part(out_left, y_left, left_y, row, n * (LEFT + RIGHT))
        store_part(out_right, y_right, right_y, row, n * (LEFT + RIGHT) + LEFT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n"])
def gate_up_pairs_kernel(
    x_desc,  # [T, K]
    left_desc,  # [2, N, K] in blocks of LEFT outputs: gate rows, up rows
    right_desc,  # the same in blocks of RIGHT
    out_left,  # [T, N]
    out_right,
    tiles_m,
    tiles_n,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GATE: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups that multiply."""
    if EARLY:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    left_smem = gl.allocate_shared_memory(dtype, [STAGES] + left_desc.block_shape, left_desc.layout)  # noqa: RUF005
    right_smem = gl.allocate_shared_memory(dtype, [STAGES] + right_desc.block_shape, right_desc.layout)  # noqa: RUF005
    y_left = gl.allocate_shared_memory(dtype, [2, ROWS, LEFT], out_left.layout)
    y_right = gl.allocate_shared_memory(dtype, [2, ROWS, RIGHT], out_right.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (pair_tiles, (out_left, out_right, x_smem, left_smem, right_smem, y_left.index(0), y_right.index(0), ready,
                          free, tiles_m, tiles_n, K, STAGES, GROUP, EARLY, 0, GATE)),
            (pair_tiles, (out_left, out_right, x_smem, left_smem, right_smem, y_left.index(1), y_right.index(1), ready,
                          free, tiles_m, tiles_n, K, STAGES, GROUP, EARLY, 1, GATE)),
            (copy_pairs, (x_desc, left_desc, right_desc, x_smem, left_smem, right_smem, ready, free, tiles_m, tiles_n,
                          K, STAGES, GROUP, EARLY)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
