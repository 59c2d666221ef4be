"""``wide_gelu`` where an SM gets few tiles: two warpgroups take turns at the matrix units, each with tiles of its own.

A tile of 128 x 128 is multiplied by one warpgroup, which then finishes it while the other one multiplies. So half as much is
finished behind a program's last product as with tiles of 256 weight rows, and narrower tiles fill the last wave better.
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

from headway.kernels.wide_linear.hopper.triton import BLOCK_K, BLOCK_M, copy_tiles, gelu, tile_place, widen


@gluon.jit
def turn_tiles(
    out_desc, bias_ptr, x_smem, w_smem, y_smem, bars, turns, tiles_m, tiles_n, N: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GELU: gl.constexpr, EARLY: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies every other tile of a program, and finishes it while the other multiplies."""
    ready, free, _, _ = bars
    WIDE: gl.constexpr = w_smem.shape[2]
    CHUNKS: gl.constexpr = K // BLOCK_K
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    if EARLY:
        gdc_wait()
    count = WHO * CHUNKS
    turn = 0
    for tile in range(gl.program_id(0) + WHO * gl.num_programs(0), tiles_m * tiles_n, 2 * gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([BLOCK_M, WIDE], gl.float32, layout=ACC)
        mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
        for chunk in range(CHUNKS):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            b = w_smem.index(stage).reshape([WIDE, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(x_smem.index(stage), b, acc, use_acc=chunk > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=chunk > 0)
            count += 1
        mbarrier.arrive(turns.index(1 - WHO))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        at = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC))
        # Here, or the assembler lets go of the buffer behind GELU.
        bias = gl.load(bias_ptr + at, mask=at < N, other=0.0).to(gl.float32)
        y = (acc + gl.expand_dims(bias, 0)).to(y_smem.dtype)
        y = gelu(widen(y), GELU).to(y_smem.dtype)
        tma.store_wait(0)
        gl.thread_barrier()
        y_smem.store(y)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [m * BLOCK_M, n * WIDE], y_smem)
        count += CHUNKS
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n"])
def turns_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, N, K]
    out_desc,  # [T, N]
    bias_ptr,  # [N]
    tiles_m,
    tiles_n,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GELU: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups. GELU as in ``GATES``."""
    if EARLY:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005
    y_smem = gl.allocate_shared_memory(dtype, [2] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for who in gl.static_range(2):
        mbarrier.init(turns.index(who), count=1)
    fence_async_shared()
    bars = (ready, free, turns, turns)
    gl.warp_specialize(
        [
            (turn_tiles, (out_desc, bias_ptr, x_smem, w_smem, y_smem.index(0), bars, turns, tiles_m, tiles_n, N, K, STAGES,
                          GROUP, GELU, EARLY, 0)),
            (turn_tiles, (out_desc, bias_ptr, x_smem, w_smem, y_smem.index(1), bars, turns, tiles_m, tiles_n, N, K, STAGES,
                          GROUP, GELU, EARLY, 1)),
            (copy_tiles, (x_desc, weight_desc, x_smem, w_smem, bars, tiles_m, tiles_n, K, STAGES, GROUP, EARLY)),
        ],
        [4, 1],
        [224, 40],
    )  # fmt: skip
