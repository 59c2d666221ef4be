"""Gluon kernel of the linear layers for 3 to 256 rows: weights are in shared memory before the activations come.

A program owns ``WIDE`` weight rows and ``ROWS`` rows of activations, over the whole of K or one of its ``splits``. It starts
copying its first ``W_AHEAD`` chunks of weights, then waits for the kernel before it (see ``triton_early``); what is left is to
read the activations from the L2 cache, which every program does, ``X_AHEAD`` chunks in flight, and to multiply, one warpgroup
product a chunk. With several blocks of rows each reads the weights: they run together, one from memory, others from the cache.

This is Gluon, Triton's lower-level language: Triton itself copies nothing to shared memory ahead of the loop that reads it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def copy_layout(block_k, warps):
    """Threads over [rows, BLOCK_K], 16 bytes of a row each."""
    lanes = min(32, block_k // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def store_layout(width, warps):
    """Threads over [ROWS, width], each 8 neighbours of a row."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(rows, wide, warps):
    """Warps of a product: 16 rows each, as far as there are rows; the others take other columns."""
    down = min(warps, rows // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, wide * down // warps, 16])


@gluon.constexpr_function
def least(a, b):
    return min(a, b)


@gluon.jit
def chunk_start(chunk, turn, CHUNKS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Where the program's chunk number ``chunk`` begins; programs begin at different ones, or all want the same lines."""
    return (chunk + turn) % CHUNKS * BLOCK_K


@gluon.jit(do_not_specialize=["num_rows"])
def mid_linear_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K], for SILU [2 * N, K]
    bias_ptr,  # [N] or [2 * N] when BIAS
    out_ptr,  # [T, N], or f32 [splits, T, N]
    num_rows,
    x_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    W_AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr,
    TRAILING: gl.constexpr,  # products that may still run when the next one starts: 0 or 1
    RING: gl.constexpr,  # chunks that are unrolled: all of them, or a multiple of both numbers of buffers
    BIAS: gl.constexpr,
    SILU: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: programs over N, splits of CHUNKS * BLOCK_K inputs each, programs over T. X_AHEAD <= W_AHEAD <= CHUNKS."""
    if EARLY:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    COPY: gl.constexpr = copy_layout(BLOCK_K, WARPS)
    ACC: gl.constexpr = product_layout(ROWS, WIDE, WARPS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PAIR: gl.constexpr = 2 if SILU else 1
    BLOCK_N: gl.constexpr = WIDE // PAIR
    W_BUFFERS: gl.constexpr = least(W_AHEAD + 1 + TRAILING, CHUNKS)
    X_BUFFERS: gl.constexpr = least(X_AHEAD + 1 + TRAILING, CHUNKS)
    first = gl.program_id(0) * BLOCK_N
    split = gl.program_id(1)
    turn = gl.program_id(0) % CHUNKS
    lane = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY)), 0) + split * (CHUNKS * BLOCK_K)
    wide = gl.arange(0, WIDE, layout=gl.SliceLayout(1, COPY))
    keep_w = gl.expand_dims(wide < WIDE, 1)
    unit = gl.minimum(first + wide // PAIR, N - 1)  # gate and up rows of an output lie side by side in the tile
    weight_at = weight_ptr + gl.expand_dims((unit + wide % PAIR * N).to(gl.int64) * K, 1) + lane
    start_row = gl.program_id(2) * ROWS
    token = start_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    x_at = x_ptr + gl.expand_dims(token * x_stride, 1) + lane
    keep_x = gl.expand_dims(token < num_rows, 1)  # other rows become zeros
    weights = ()
    for _ in gl.static_range(W_BUFFERS):
        weights = weights + (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [WIDE, BLOCK_K], SHARED),)  # noqa: RUF005
    xs = ()
    for _ in gl.static_range(X_BUFFERS):
        xs = xs + (gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROWS, BLOCK_K], SHARED),)  # noqa: RUF005
    for i in gl.static_range(W_AHEAD):
        async_copy.async_copy_global_to_shared(weights[i], weight_at + chunk_start(i, turn, CHUNKS, BLOCK_K))
    async_copy.commit_group()
    if EARLY:
        gdc_wait()
    for i in gl.static_range(X_AHEAD):
        async_copy.async_copy_global_to_shared(xs[i], x_at + chunk_start(i, turn, CHUNKS, BLOCK_K), mask=keep_x)
        async_copy.commit_group()

    acc = gl.zeros([ROWS, WIDE], gl.float32, layout=ACC)
    for ring in range(CHUNKS // RING):  # once when all chunks are unrolled
        for j in gl.static_range(RING):
            chunk = ring * RING + j
            if j > TRAILING and (
                RING < CHUNKS or j + X_AHEAD < CHUNKS
            ):  # an earlier product's buffers are filled anew below
                acc = warpgroup_mma_wait(TRAILING, deps=[acc])
            async_copy.wait_group(X_AHEAD - 1)
            gl.thread_barrier()  # all warps see the copies, and have read what the next ones overwrite
            fence_async_shared()
            acc = warpgroup_mma(xs[j % X_BUFFERS], weights[j % W_BUFFERS].permute((1, 0)), acc, is_async=True)
            if RING < CHUNKS or j + X_AHEAD < CHUNKS:
                start = chunk_start(chunk + X_AHEAD, turn, CHUNKS, BLOCK_K)
                keep = keep_x & (chunk + X_AHEAD < CHUNKS)
                async_copy.async_copy_global_to_shared(xs[(j + X_AHEAD) % X_BUFFERS], x_at + start, mask=keep)
            if RING < CHUNKS or j + W_AHEAD < CHUNKS:
                start = chunk_start(chunk + W_AHEAD, turn, CHUNKS, BLOCK_K)
                keep = keep_w & (chunk + W_AHEAD < CHUNKS)
                async_copy.async_copy_global_to_shared(weights[(j + W_AHEAD) % W_BUFFERS], weight_at + start, mask=keep)
            async_copy.commit_group()
        acc = warpgroup_mma_wait(0, deps=[acc])

    if BIAS:
        wide_bias = gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC))
        unit_bias = gl.minimum(first + wide_bias // PAIR, N - 1)
        bias = gl.load(bias_ptr + unit_bias + wide_bias % PAIR * N).to(gl.float32)
        acc += gl.expand_dims(gl.where(split == 0, bias, 0.0), 0)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    y = acc.to(dtype)
    if SILU:
        gate, up = gl.split(gl.reshape(y.to(gl.float32), [ROWS, BLOCK_N, 2]))
        silu = (gate / (1.0 + gl.exp2(-gate * LOG2E))).to(dtype).to(gl.float32)
        y = (silu * up).to(dtype)
    STORE: gl.constexpr = store_layout(BLOCK_N, WARPS)
    y = gl.convert_layout(y, STORE)
    row = start_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    col = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORE))
    keep = gl.expand_dims(row < num_rows, 1) & gl.expand_dims(col < N, 0)
    gl.store(out_ptr + gl.expand_dims((split * num_rows + row) * N, 1) + gl.expand_dims(col, 0), y, mask=keep)
