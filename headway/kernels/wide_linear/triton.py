"""Gluon kernel: silu(gate) * up in the epilogue of the product that makes them, for many tokens.

A persistent program per processor takes output tiles of 128 tokens x 128 outputs, each the product of 128 tokens with 128 gate
rows and the 128 up rows beside them. A warp of its own copies tiles by the tensor memory engine, as far ahead as there is
shared memory; two warpgroups multiply, each 64 of the tokens. They meet nowhere but at the buffers, so that one computes its
exponentials while the other keeps the tensor cores busy.

This is Gluon, Triton's lower-level language.
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

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(row of tiles, column of tiles): GROUP rows share their weights in the L2 cache before the next ones begin."""
    group = tile // (GROUP * tiles_n)
    first = group * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    inside = tile - group * (GROUP * tiles_n)
    return first + inside % rows, inside // rows


@gluon.jit
def copy_tiles(
    x_desc, weight_desc, x_smem, w_smem, ready, free, tiles_m, tiles_n, K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        for chunk in range(K // BLOCK_K):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, 2 * BLOCK_K * (BLOCK_M + 2 * BLOCK_N))
            tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, chunk * BLOCK_K], bar, x_smem.index(stage))
            tma.async_copy_global_to_shared(weight_desc, [0, n * BLOCK_N, chunk * BLOCK_K], bar, w_smem.index(stage))
            count += 1


@gluon.jit
def multiply_tiles(
    out_desc, x_smem, w_smem, out_smem, ready, free, tiles_m, tiles_n, K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows HALF * 64 to HALF * 64 + 63 of each tile."""
    ROWS: gl.constexpr = BLOCK_M // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    dtype: gl.constexpr = x_smem.dtype
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([ROWS, 2 * BLOCK_N], gl.float32, layout=ACC)
        for chunk in range(K // BLOCK_K):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            a = x_smem.index(stage).slice(HALF * ROWS, ROWS)
            b = w_smem.index(stage).reshape([2 * BLOCK_N, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=chunk > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=chunk > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        halves = gl.permute(gl.reshape(acc, [ROWS, 2, BLOCK_N]), [0, 2, 1])
        gate, up = gl.split(halves)
        gate = gate.to(dtype).to(gl.float32)
        up = up.to(dtype).to(gl.float32)
        silu = (gate / (1.0 + gl.exp2(-gate * LOG2E))).to(dtype).to(gl.float32)
        y = (silu * up).to(dtype)
        tma.store_wait(0)
        gl.thread_barrier()  # the copy out of the tile before has read it
        out_smem.store(y)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [m * BLOCK_M + HALF * ROWS, n * BLOCK_N], out_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n"])
def gate_up_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [2, N, K]: gate rows, up rows
    out_desc,  # [T, N]
    tiles_m,
    tiles_n,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Grid: programs that stay; 4 warps, which are one of the two warpgroups that multiply."""
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, 2, BLOCK_N, BLOCK_K], weight_desc.layout)
    out_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, BLOCK_N], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (out_desc, x_smem, w_smem, out_smem.index(0), ready, free, tiles_m, tiles_n, K, STAGES,
                              GROUP, 0)),
            (multiply_tiles, (out_desc, x_smem, w_smem, out_smem.index(1), ready, free, tiles_m, tiles_n, K, STAGES,
                              GROUP, 1)),
            (copy_tiles, (x_desc, weight_desc, x_smem, w_smem, ready, free, tiles_m, tiles_n, K, STAGES, GROUP)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
