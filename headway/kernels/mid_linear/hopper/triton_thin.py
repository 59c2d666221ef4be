"""The Gluon kernel of linear layers for up to 64 rows whose copies are a warp's own work.

As ``wide_linear``'s kernels, which see, with one warpgroup that multiplies: a program takes tiles of 64 rows and 32 to 256
weight rows, of a product that is stored one after the other, and all its buffers of weights are being filled before the kernel
ahead has ended.
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

from headway.kernels.mid_linear.hopper.triton import (
    ROOM_PAD,
    load_squares,
    meet_all,
    store_layout,
    store_sum,
)
from headway.kernels.triton_cluster import arrive_alone, cluster_buffer, cluster_wait, init_mailbox
from headway.kernels.wide_linear.hopper.triton import BLOCK_K, ROWS, gate_mul, halves


@gluon.constexpr_function
def sum_layout(wide):
    """Of the sums [ROWS, wide] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide, 16])


@gluon.constexpr_function
def squares_layout(parts):
    """Threads over [parts, ROWS] sums of squares; a warp has 16 rows."""
    return gl.BlockedLayout([max(1, parts // 2), 1], [2, 16], [1, 4], [0, 1])


@gluon.jit
def row_scale(squares, eps, K: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 1]: one over the root of the mean square of what the sums are of."""
    scale = gl.rsqrt(gl.sum(squares, axis=0) / K + eps)
    return gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def product(x_smem, w_smem, ready, free, count, K: gl.constexpr, STAGES: gl.constexpr):
    """f32 [ROWS, WIDE] of a tile whose first chunk is the program's number ``count``."""
    WIDE: gl.constexpr = w_smem.shape[1] * w_smem.shape[2]
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout=sum_layout(WIDE))
    for chunk in range(K // BLOCK_K):
        stage = (count + chunk) % STAGES
        mbarrier.wait(ready.index(stage), (count + chunk) // STAGES & 1)
        b = w_smem.index(stage).reshape([WIDE, BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(x_smem.index(stage), b, acc, use_acc=chunk > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((count + chunk + STAGES - 1) % STAGES), pred=chunk > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((count + K // BLOCK_K + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def copy_thin(
    x_desc, weight_desc, x_smem, w_smem, ready, free, first, step, tiles, begin, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp: ``CHUNKS`` chunks of inputs from ``begin`` on, for tiles ``first``, ``first`` + ``step`` and so on."""
    AHEAD: gl.constexpr = STAGES if STAGES < CHUNKS else CHUNKS
    EACH: gl.constexpr = w_smem.shape[2]
    BYTES: gl.constexpr = 2 * BLOCK_K * (ROWS + w_smem.shape[1] * EACH)
    for i in gl.static_range(AHEAD):  # what needs nothing of the kernel ahead
        mbarrier.expect(ready.index(i), BYTES)
        tma.async_copy_global_to_shared(
            weight_desc, [0, first * EACH, begin + i * BLOCK_K], ready.index(i), w_smem.index(i)
        )
    if EARLY:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        tma.async_copy_global_to_shared(x_desc, [0, begin + i * BLOCK_K], ready.index(i), x_smem.index(i))
    count = 0
    for tile in range(first, tiles, step):
        for chunk in range(CHUNKS):
            if count >= AHEAD:
                stage = count % STAGES
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                bar = ready.index(stage)
                mbarrier.expect(bar, BYTES)
                at = begin + chunk * BLOCK_K
                tma.async_copy_global_to_shared(weight_desc, [0, tile * EACH, at], bar, w_smem.index(stage))
                tma.async_copy_global_to_shared(x_desc, [0, at], bar, x_smem.index(stage))
            count += 1


@gluon.jit
def thin_tiles(
    out_desc, bias_ptr, squares_ptr, x_smem, w_smem, out_smem, ready, free, num_tokens, num_parts, eps, tiles,
    N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The warpgroup that multiplies."""
    dtype: gl.constexpr = x_smem.dtype
    WIDE: gl.constexpr = w_smem.shape[1] * w_smem.shape[2]
    BLOCK_N: gl.constexpr = out_smem.shape[1]
    if EARLY:
        gdc_wait()
    if PARTS > 0:
        OVER: gl.constexpr = squares_layout(PARTS)
        part = gl.expand_dims(gl.arange(0, PARTS, layout=gl.SliceLayout(1, OVER)), 1)
        row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, OVER)), 0)
        squares = load_squares(squares_ptr, part, row, num_parts, num_tokens)
        for begin in range(PARTS, num_parts, PARTS):
            squares += load_squares(squares_ptr, begin + part, row, num_parts, num_tokens)
        scale = row_scale(squares, eps, K, sum_layout(WIDE))
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = product(x_smem, w_smem, ready, free, count, K, STAGES)
        count += K // BLOCK_K
        if PARTS > 0:
            acc *= scale
        if BIAS:
            wide = gl.arange(0, WIDE, layout=gl.SliceLayout(0, sum_layout(WIDE)))
            unit = gl.minimum(tile * BLOCK_N + wide % BLOCK_N, N - 1)
            acc += gl.expand_dims(gl.load(bias_ptr + unit + wide // BLOCK_N * N).to(gl.float32), 0)
        if GATE:
            gate, up = halves(acc, WIDE // 2)
            y = gate_mul(gate, up, dtype, GATE)
        else:
            y = acc.to(dtype)
        tma.store_wait(0)
        gl.thread_barrier()  # the copy out of the tile before has read it
        out_smem.store(y)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [0, tile * BLOCK_N], out_smem)
    tma.store_wait(0)


@gluon.jit
def thin_buffers(x_desc, weight_desc, STAGES: gl.constexpr):
    """(activations, weights, barriers of filled buffers, of free ones)."""
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    return x_smem, w_smem, ready, free


@gluon.jit(do_not_specialize=["num_tokens", "num_parts", "tiles"])
def thin_linear_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, N, K], for gates [2, N, K]
    out_desc,  # [T, N]
    bias_ptr,  # [N] or [2 * N] when BIAS
    squares_ptr,  # f32 [num_parts, T]
    num_tokens,
    num_parts,
    eps,
    tiles,
    N: gl.constexpr,
    K: gl.constexpr,
    PARTS: gl.constexpr,  # sums of squares that are loaded together; 0 when x is used as it is
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which multiply."""
    if EARLY:
        gdc_launch_dependents()
    x_smem, w_smem, ready, free = thin_buffers(x_desc, weight_desc, STAGES)
    out_smem = gl.allocate_shared_memory(x_desc.dtype, out_desc.block_shape, out_desc.layout)
    first, step = gl.program_id(0), gl.num_programs(0)
    gl.warp_specialize(
        [
            (thin_tiles, (out_desc, bias_ptr, squares_ptr, x_smem, w_smem, out_smem, ready, free, num_tokens, num_parts, eps,
                          tiles, N, K, PARTS, STAGES, BIAS, GATE, EARLY)),
            (copy_thin, (x_desc, weight_desc, x_smem, w_smem, ready, free, first, step, tiles, 0, K // BLOCK_K, STAGES,
                         EARLY)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def thin_sum(
    bias_ptr, residual_ptr, norm_ptr, out_ptr, squares_ptr, x_smem, w_smem, ready, free, box, num_rows,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr, BIAS: gl.constexpr,
    EARLY: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """The warpgroup that multiplies."""
    WIDE: gl.constexpr = w_smem.shape[2]
    SHARE: gl.constexpr = store_layout(ROWS // CLUSTER, WIDE, 4)
    rank = gl.program_id(0) % CLUSTER
    tile = gl.program_id(0) // CLUSTER
    row = rank + CLUSTER * gl.arange(0, ROWS // CLUSTER, layout=gl.SliceLayout(1, SHARE))
    col = tile * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, SHARE))
    norm = gl.load(norm_ptr + col, mask=col < N, other=0.0).to(gl.float32)
    if CLUSTER > 1:
        cluster_wait()
    if EARLY:
        gdc_wait()
    keep = gl.expand_dims(row < num_rows, 1) & gl.expand_dims(col < N, 0)
    at = gl.expand_dims(row * N, 1) + gl.expand_dims(col, 0)
    residual = gl.load(residual_ptr + at, mask=keep, other=0.0)
    acc = product(x_smem, w_smem, ready, free, 0, K // CLUSTER, STAGES)
    total = meet_all(acc, box, rank, num_rows, ROWS, WIDE, CLUSTER, sum_layout(WIDE), SHARE)
    if BIAS:
        total += gl.expand_dims(gl.load(bias_ptr + col, mask=col < N, other=0.0).to(gl.float32), 0)
    at_squares = squares_ptr + tile * num_rows
    store_sum(total, residual, norm, residual_ptr, out_ptr, at_squares, at, keep, row, num_rows, FACTOR)


@gluon.jit(do_not_specialize=["num_rows"])
def thin_add_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, N, K]
    bias_ptr,  # [N] when BIAS
    residual_ptr,  # [T, N], read and written
    norm_ptr,  # [N]
    out_ptr,  # [T, N]
    squares_ptr,  # f32 [programs over N, T]
    num_rows,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    CLUSTER: gl.constexpr,
    BIAS: gl.constexpr,
    EARLY: gl.constexpr,
    FACTOR: gl.constexpr = 1.0,  # of the product
):
    """Grid: programs over N times CLUSTER parts of K; 4 warps, which multiply."""
    if EARLY:
        gdc_launch_dependents()
    x_smem, w_smem, ready, free = thin_buffers(x_desc, weight_desc, STAGES)
    WIDE: gl.constexpr = weight_desc.block_shape[1]
    rank = gl.program_id(0) % CLUSTER
    tile = gl.program_id(0) // CLUSTER
    box = 0
    if CLUSTER > 1:
        box = cluster_buffer(16 + 4 * ROWS * (WIDE + ROOM_PAD), CLUSTER)
        finished = (gl.minimum(num_rows, ROWS) - rank + CLUSTER - 1) // CLUSTER  # rows, by this program
        init_mailbox(box, finished * (CLUSTER * WIDE * 4))
        arrive_alone(128)
    gl.warp_specialize(
        [
            (thin_sum, (bias_ptr, residual_ptr, norm_ptr, out_ptr, squares_ptr, x_smem, w_smem, ready, free, box, num_rows,
                        N, K, STAGES, CLUSTER, BIAS, EARLY, FACTOR)),
            (copy_thin, (x_desc, weight_desc, x_smem, w_smem, ready, free, tile, 1, tile + 1, rank * (K // CLUSTER),
                         K // CLUSTER // BLOCK_K, STAGES, EARLY)),
        ],
        [1],
        [24],
    )  # fmt: skip
