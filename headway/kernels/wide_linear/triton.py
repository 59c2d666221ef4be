"""Gluon kernels of the layers' products for many tokens, with what follows them in the epilogue.

A persistent program per processor takes tiles of 128 tokens x 256 or 128 weight rows. A warp of its own copies them by the
tensor memory engine, as far ahead as there is shared memory, its first weights before the kernel ahead has ended (see
``triton_early``); two warpgroups multiply, each 64 of the tokens. They meet nowhere but at the buffers, so that one computes
its epilogue while the other keeps the tensor cores busy.

This is Gluon, Triton's lower-level language: Triton itself has no warps of different kinds on Hopper.
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

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK_M = gl.constexpr(128)
ROWS = gl.constexpr(64)
"""Tokens of a warpgroup."""
BLOCK_K = gl.constexpr(64)


@gluon.constexpr_function
def layout_of(x):
    """How a tensor lies in registers."""
    return x.type.layout


@gluon.constexpr_function
def sum_layout(wide):
    """Of the sums [ROWS, wide] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, 16])


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
    GROUP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    CHUNKS: gl.constexpr = K // BLOCK_K
    AHEAD: gl.constexpr = STAGES if STAGES < CHUNKS else CHUNKS
    ROWS_EACH: gl.constexpr = w_smem.shape[2]  # weight rows of each part of a tile
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_M + w_smem.shape[1] * ROWS_EACH)
    m_first, n_first = tile_place(gl.program_id(0), tiles_m, tiles_n, GROUP)
    for i in gl.static_range(AHEAD):  # what needs nothing of the kernel ahead
        begin = [0, n_first * ROWS_EACH, i * BLOCK_K]
        mbarrier.expect(ready.index(i), BYTES)
        tma.async_copy_global_to_shared(weight_desc, begin, ready.index(i), w_smem.index(i))
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
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                bar = ready.index(stage)
                mbarrier.expect(bar, BYTES)
                at = chunk * BLOCK_K
                tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, at], bar, x_smem.index(stage))
                tma.async_copy_global_to_shared(weight_desc, [0, n * ROWS_EACH, at], bar, w_smem.index(stage))
            count += 1


@gluon.jit
def product(x_smem, w_smem, ready, free, count, K: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr):
    """f32 [ROWS, WIDE] of the next tile, whose first chunk is the program's number ``count``; ``finish`` it before use."""
    WIDE: gl.constexpr = w_smem.shape[1] * w_smem.shape[2]
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout=sum_layout(WIDE))
    for chunk in range(K // BLOCK_K):
        stage = (count + chunk) % STAGES
        mbarrier.wait(ready.index(stage), (count + chunk) // STAGES & 1)
        a = x_smem.index(stage).slice(HALF * ROWS, ROWS)
        b = w_smem.index(stage).reshape([WIDE, BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=chunk > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((count + chunk + STAGES - 1) % STAGES), pred=chunk > 0)
    return acc


@gluon.jit
def finish(acc, free, count, STAGES: gl.constexpr):
    """The product that ended with the program's chunk before ``count``."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def halves(x, COLUMNS: gl.constexpr):
    """[ROWS, 2 * COLUMNS] -> its left and its right half; nothing moves between threads."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS]), [0, 2, 1]))


@gluon.jit
def silu_mul(gate, up, dtype: gl.constexpr):
    """silu(gate) * up, with the rounding of the separate ops."""
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    silu = (gate / (1.0 + gl.exp2(-gate * LOG2E))).to(dtype).to(gl.float32)
    return (silu * up).to(dtype)


@gluon.jit
def gate_up_tiles(
    out_desc, x_smem, w_smem, out_smem, ready, free, tiles_m, tiles_n, K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, EARLY: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows HALF * ROWS to HALF * ROWS + ROWS of each tile."""
    dtype: gl.constexpr = x_smem.dtype
    WIDE: gl.constexpr = 2 * w_smem.shape[2]
    if EARLY:
        gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        acc = product(x_smem, w_smem, ready, free, count, K, STAGES, HALF)
        count += K // BLOCK_K
        acc = finish(acc, free, count, STAGES)
        gate, up = halves(acc, WIDE // 2)
        y = silu_mul(gate, up, dtype)
        tma.store_wait(0)
        gl.thread_barrier()  # the copy out of the tile before has read it
        out_smem.store(y)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [m * BLOCK_M + HALF * ROWS, n * (WIDE // 2)], out_smem)
    tma.store_wait(0)


@gluon.jit
def make_buffers(x_desc, weight_desc, STAGES: gl.constexpr):
    """(activations, weights, barriers of filled buffers, of free ones)."""
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    return x_smem, w_smem, ready, free


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
    EARLY: gl.constexpr,
):
    """Grid: programs that stay; 4 warps, which are one of the two warpgroups that multiply."""
    if EARLY:
        gdc_launch_dependents()
    x_smem, w_smem, ready, free = make_buffers(x_desc, weight_desc, STAGES)
    out_smem = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS, weight_desc.block_shape[1]], out_desc.layout)
    gl.warp_specialize(
        [
            (gate_up_tiles, (out_desc, x_smem, w_smem, out_smem.index(0), ready, free, tiles_m, tiles_n, K, STAGES,
                             GROUP, EARLY, 0)),
            (gate_up_tiles, (out_desc, x_smem, w_smem, out_smem.index(1), ready, free, tiles_m, tiles_n, K, STAGES,
                             GROUP, EARLY, 1)),
            (copy_tiles, (x_desc, weight_desc, x_smem, w_smem, ready, free, tiles_m, tiles_n, K, STAGES, GROUP, EARLY)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


@gluon.jit
def add_tiles(
    residual_ptr, x_smem, w_smem, out_smem, ready, free, num_tokens, tiles_m, tiles_n, N: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows HALF * ROWS to HALF * ROWS + ROWS of each tile."""
    WIDE: gl.constexpr = w_smem.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = x_smem.dtype
    lane = gl.arange(0, WIDE // 2, layout=gl.SliceLayout(0, COPY))
    if EARLY:
        gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        acc = product(x_smem, w_smem, ready, free, count, K, STAGES, HALF)
        count += K // BLOCK_K
        # What the product is added to is asked for while its last parts run.
        row = m * BLOCK_M + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
        col = n * WIDE + lane
        at = residual_ptr + gl.expand_dims(row * N, 1) + gl.expand_dims(col, 0)
        inside = gl.expand_dims(row < num_tokens, 1)
        keeps = (inside & gl.expand_dims(col < N, 0), inside & gl.expand_dims(col + WIDE // 2 < N, 0))
        before = (gl.load(at, mask=keeps[0], other=0.0), gl.load(at + WIDE // 2, mask=keeps[1], other=0.0))
        acc = finish(acc, free, count, STAGES)
        parts = halves(acc.to(dtype), WIDE // 2)
        for i in gl.static_range(2):
            gl.thread_barrier()  # the part before has been read
            out_smem.store(parts[i])
            gl.thread_barrier()
            y = out_smem.load(COPY).to(gl.float32) + before[i].to(gl.float32)
            gl.store(at + i * (WIDE // 2), y.to(dtype), mask=keeps[i])


@gluon.jit(do_not_specialize=["num_tokens", "tiles_m", "tiles_n"])
def add_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, N, K]
    residual_ptr,  # [T, N]
    num_tokens,
    tiles_m,
    tiles_n,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: programs that stay; 4 warps, which are one of the two warpgroups that multiply."""
    if EARLY:
        gdc_launch_dependents()
    x_smem, w_smem, ready, free = make_buffers(x_desc, weight_desc, STAGES)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    out_smem = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS, weight_desc.block_shape[1] // 2], LAYOUT)
    gl.warp_specialize(
        [
            (add_tiles, (residual_ptr, x_smem, w_smem, out_smem.index(0), ready, free, num_tokens,
                         tiles_m, tiles_n, N, K, STAGES, GROUP, EARLY, 0)),
            (add_tiles, (residual_ptr, x_smem, w_smem, out_smem.index(1), ready, free, num_tokens,
                         tiles_m, tiles_n, N, K, STAGES, GROUP, EARLY, 1)),
            (copy_tiles, (x_desc, weight_desc, x_smem, w_smem, ready, free, tiles_m, tiles_n, K, STAGES, GROUP, EARLY)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
