"""Gluon kernels of the linear layers for 3 to 256 rows: weights are in shared memory before the activations come.

A program owns ``WIDE`` weight rows and ``ROWS`` rows of activations, over the whole of K or one of its parts. It starts copying
its first ``W_AHEAD`` chunks of weights, then waits for the kernel before it (see ``triton_early``); what is left is to read the
activations from the L2 cache, which every program does, ``X_AHEAD`` chunks in flight, and to multiply, one warpgroup product a
chunk. With several blocks of rows each reads the weights: they run together, one from memory, others from the cache.

``mid_add_kernel`` has the parts of K in a cluster of programs: each pushes its sums into the shared memory of the programs that
finish them, every program some of the rows. Parts are added in their order, whichever comes first.

This is Gluon, Triton's lower-level language: Triton itself copies nothing to shared memory ahead of the loop that reads it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.triton_cluster import (
    cluster_buffer,
    cluster_wait,
    open_mailbox,
    place_in,
    pull4,
    send2,
    wait_mailbox,
)
from headway.kernels.wide_linear.hopper.triton import gate_mul

ROOM_PAD = gl.constexpr(8)
"""Floats between two rows of sums that were pushed, so that the rows of a warp's store lie in different banks."""


@gluon.constexpr_function
def copy_layout(block_k, warps):
    """Threads over [rows, BLOCK_K], 16 bytes of a row each."""
    lanes = min(32, block_k // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def store_layout(rows, width, warps):
    """Threads over [rows, width], each 8 neighbours of a row, or 4 where that is enough for all."""
    each = 8 if rows * width >= 256 * warps else 4
    lanes = min(32, width // each)
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(rows, wide, warps):
    """Warps of a product: 16 rows each, as far as there are rows; the others take other columns."""
    down = min(warps, rows // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, wide * down // warps, 16])


@gluon.constexpr_function
def squares_layout(parts, rows, warps):
    """Threads over [parts, rows]: neighbours of a part, and other parts where warps are left over."""
    across = min(warps, rows // 32)
    down = warps // across if parts > 16 else 1
    return gl.BlockedLayout([parts // down, 1], [1, 32], [down, warps // down], [1, 0])


@gluon.constexpr_function
def least(a, b):
    return min(a, b)


@gluon.jit
def chunk_start(chunk, turn, CHUNKS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Where the program's chunk number ``chunk`` begins; programs begin at different ones, or all want the same lines."""
    return (chunk + turn) % CHUNKS * BLOCK_K


@gluon.jit
def buffers(like_ptr, COUNT: gl.constexpr, HEIGHT: gl.constexpr, BLOCK_K: gl.constexpr):
    """``COUNT`` buffers [HEIGHT, BLOCK_K] in shared memory, as products want them."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    made = ()
    for _ in gl.static_range(COUNT):
        made = made + (gl.allocate_shared_memory(like_ptr.dtype.element_ty, [HEIGHT, BLOCK_K], SHARED),)  # noqa: RUF005
    return made


@gluon.jit
def weight_rows(weight_ptr, first, lane, N: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr, PAIR: gl.constexpr,
                COPY: gl.constexpr):  # fmt: skip
    """Where the weight rows of outputs ``first`` and on begin; those of gate and up lie side by side in a tile."""
    wide = gl.arange(0, WIDE, layout=gl.SliceLayout(1, COPY))
    unit = gl.minimum(first + wide // PAIR, N - 1)
    return weight_ptr + gl.expand_dims((unit + wide % PAIR * N).to(gl.int64) * K, 1) + lane


@gluon.jit
def copy_weights(buffer, weight_at, start, keep, COPY: gl.constexpr):
    """Start copying a chunk of weights where ``keep``."""
    every = gl.expand_dims(gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, COPY)) < buffer.shape[0], 1)
    async_copy.async_copy_global_to_shared(buffer, weight_at + start, mask=every & keep)


@gluon.jit
def multiply_run(
    xs, weights, more, x_at, weight_at, more_at, keep_x, turn, first, acc, more_acc,
    COUNT: gl.constexpr, LAST: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_K: gl.constexpr, W_AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr, TRAILING: gl.constexpr, MORE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """``multiply`` for COUNT chunks from ``first``, a multiple of both numbers of buffers; LAST: no chunk comes after them."""
    X_BUFFERS: gl.constexpr = least(X_AHEAD + 1 + TRAILING, CHUNKS)
    W_BUFFERS: gl.constexpr = least(W_AHEAD + 1 + TRAILING, CHUNKS)
    for j in gl.static_range(COUNT):
        chunk = first + j
        # An earlier product's buffers are filled anew below.
        if j > TRAILING and (not LAST or j + X_AHEAD < COUNT):
            if MORE > 0:
                acc, more_acc = warpgroup_mma_wait(2 * TRAILING, deps=[acc, more_acc])
            else:
                acc = warpgroup_mma_wait(TRAILING, deps=[acc])
        async_copy.wait_group(X_AHEAD - 1)
        gl.thread_barrier()  # all warps see the copies, and have read what the next ones overwrite
        fence_async_shared()
        acc = warpgroup_mma(xs[j % X_BUFFERS], weights[j % W_BUFFERS].permute((1, 0)), acc, is_async=True)
        if MORE > 0:
            more_acc = warpgroup_mma(xs[j % X_BUFFERS], more[j % W_BUFFERS].permute((1, 0)), more_acc, is_async=True)
        if not LAST or j + X_AHEAD < COUNT:
            start = chunk_start(chunk + X_AHEAD, turn, CHUNKS, BLOCK_K)
            keep = keep_x & (chunk + X_AHEAD < CHUNKS)
            async_copy.async_copy_global_to_shared(xs[(j + X_AHEAD) % X_BUFFERS], x_at + start, mask=keep)
        if not LAST or j + W_AHEAD < COUNT:
            start = chunk_start(chunk + W_AHEAD, turn, CHUNKS, BLOCK_K)
            some = chunk + W_AHEAD < CHUNKS
            copy_weights(weights[(j + W_AHEAD) % W_BUFFERS], weight_at, start, some, COPY)
            if MORE > 0:
                copy_weights(more[(j + W_AHEAD) % W_BUFFERS], more_at, start, some, COPY)
        async_copy.commit_group()
    if MORE > 0:
        acc, more_acc = warpgroup_mma_wait(0, deps=[acc, more_acc])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, more_acc


@gluon.jit
def multiply(
    xs, weights, more, x_at, weight_at, more_at, keep_x, turn, acc, more_acc,
    CHUNKS: gl.constexpr, BLOCK_K: gl.constexpr, W_AHEAD: gl.constexpr, X_AHEAD: gl.constexpr,
    TRAILING: gl.constexpr, RING: gl.constexpr, MORE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """acc and the products of all chunks, of which the first X_AHEAD and W_AHEAD are being copied; with MORE also more_acc and
    those with the tile's other weights."""
    TAIL: gl.constexpr = CHUNKS % RING  # nothing when all chunks are unrolled
    for ring in range(CHUNKS // RING):
        acc, more_acc = multiply_run(
            xs, weights, more, x_at, weight_at, more_at, keep_x, turn, ring * RING, acc, more_acc,
            RING, RING == CHUNKS, CHUNKS, BLOCK_K, W_AHEAD, X_AHEAD, TRAILING, MORE, COPY,
        )  # fmt: skip
    if TAIL > 0:
        acc, more_acc = multiply_run(
            xs, weights, more, x_at, weight_at, more_at, keep_x, turn, CHUNKS - TAIL, acc, more_acc,
            TAIL, True, CHUNKS, BLOCK_K, W_AHEAD, X_AHEAD, TRAILING, MORE, COPY,
        )  # fmt: skip
    if RING < CHUNKS:
        # Masked copies write zeros, too, and what follows may use their buffers' memory for changes of layout.
        async_copy.wait_group(0)
        gl.thread_barrier()
    return acc, more_acc


@gluon.jit
def load_squares(squares_ptr, part, row, num_parts, num_rows):
    """f32: sums of squares number ``part``, of which there are ``num_parts``, of rows ``row``; zeros elsewhere."""
    return gl.load(squares_ptr + part * num_rows + row, mask=(part < num_parts) & (row < num_rows), other=0.0)


@gluon.jit
def store_columns(
    total, scale, bias_ptr, out_ptr, first, place,
    N: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Sums [ROWS, columns], with SCALED times the rows' ``scale``, become outputs ``first`` and on.

    ``place``: the first row, the split, the number of all rows.
    """
    start_row, split, num_rows = place
    ROWS: gl.constexpr = total.shape[0]
    WIDE: gl.constexpr = total.shape[1]
    SUMS: gl.constexpr = product_layout(ROWS, WIDE, gl.num_warps())
    PAIR: gl.constexpr = 2 if GATE else 1
    BLOCK_N: gl.constexpr = WIDE // PAIR
    if SCALED:
        total *= gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, SUMS)), 1)
    if BIAS:
        wide = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
        unit = gl.minimum(first + wide // PAIR, N - 1)
        bias = gl.load(bias_ptr + unit + wide % PAIR * N).to(gl.float32)
        total += gl.expand_dims(gl.where(split == 0, bias, 0.0), 0)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    y = total.to(dtype)
    if GATE:
        gate, up = gl.split(gl.reshape(y.to(gl.float32), [ROWS, BLOCK_N, 2]))
        y = gate_mul(gate, up, dtype, GATE)
    STORE: gl.constexpr = store_layout(ROWS, BLOCK_N, gl.num_warps())
    y = gl.convert_layout(y, STORE)
    row = start_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    col = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORE))
    keep = gl.expand_dims(row < num_rows, 1) & gl.expand_dims(col < N, 0)
    gl.store(out_ptr + gl.expand_dims((split * num_rows + row) * N, 1) + gl.expand_dims(col, 0), y, mask=keep)


@gluon.jit(do_not_specialize=["num_rows", "num_parts"])
def mid_linear_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K], for gates [2 * N, K]
    bias_ptr,  # [N] or [2 * N] when BIAS
    squares_ptr,  # f32 [num_parts, T]
    out_ptr,  # [T, N], or f32 [splits, T, N]
    num_rows,
    num_parts,
    x_stride,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
    MORE: gl.constexpr,  # weight rows beside WIDE, for numbers that are no power of two
    BLOCK_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    W_AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr,
    TRAILING: gl.constexpr,  # products that may still run when the next one starts: 0 or 1
    RING: gl.constexpr,  # chunks that are unrolled: all of them, or a multiple of both numbers of buffers
    PARTS: gl.constexpr,  # sums of squares that are loaded together; 0 when x is used as it is
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: programs over N, splits of CHUNKS * BLOCK_K inputs each, programs over T. X_AHEAD <= W_AHEAD <= CHUNKS."""
    if EARLY:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    COPY: gl.constexpr = copy_layout(BLOCK_K, WARPS)
    ACC: gl.constexpr = product_layout(ROWS, WIDE, WARPS)
    PAIR: gl.constexpr = 2 if GATE else 1
    first = gl.program_id(0) * ((WIDE + MORE) // PAIR)
    split = gl.program_id(1)
    turn = gl.program_id(0) % CHUNKS
    start_row = gl.program_id(2) * ROWS
    lane = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY)), 0) + split * (CHUNKS * BLOCK_K)
    weight_at = weight_rows(weight_ptr, first, lane, N, K, WIDE, PAIR, COPY)
    weights = buffers(x_ptr, least(W_AHEAD + 1 + TRAILING, CHUNKS), WIDE, BLOCK_K)
    more_at, more = weight_at, weights
    if MORE > 0:
        more_at = weight_rows(weight_ptr, first + WIDE // PAIR, lane, N, K, MORE, PAIR, COPY)
        more = buffers(x_ptr, least(W_AHEAD + 1 + TRAILING, CHUNKS), MORE, BLOCK_K)
    token = start_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    x_at = x_ptr + gl.expand_dims(token * x_stride, 1) + lane
    keep_x = gl.expand_dims(token < num_rows, 1)  # other rows become zeros
    xs = buffers(x_ptr, least(X_AHEAD + 1 + TRAILING, CHUNKS), ROWS, BLOCK_K)
    for i in gl.static_range(W_AHEAD):
        async_copy.async_copy_global_to_shared(weights[i], weight_at + chunk_start(i, turn, CHUNKS, BLOCK_K))
        if MORE > 0:
            async_copy.async_copy_global_to_shared(more[i], more_at + chunk_start(i, turn, CHUNKS, BLOCK_K))
    async_copy.commit_group()
    if EARLY:
        gdc_wait()
    if PARTS > 0:
        OVER: gl.constexpr = squares_layout(PARTS, ROWS, WARPS)
        part = gl.expand_dims(gl.arange(0, PARTS, layout=gl.SliceLayout(1, OVER)), 1)
        of_row = start_row + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, OVER)), 0)
        squares = load_squares(squares_ptr, part, of_row, num_parts, num_rows)
        for begin in range(PARTS, num_parts, PARTS):
            squares += load_squares(squares_ptr, begin + part, of_row, num_parts, num_rows)
    for i in gl.static_range(X_AHEAD):
        async_copy.async_copy_global_to_shared(xs[i], x_at + chunk_start(i, turn, CHUNKS, BLOCK_K), mask=keep_x)
        async_copy.commit_group()
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout=ACC)
    more_acc = acc
    if MORE > 0:
        MORE_ACC: gl.constexpr = product_layout(ROWS, MORE, WARPS)
        more_acc = gl.zeros([ROWS, MORE], gl.float32, layout=MORE_ACC)
    scale = eps
    if PARTS > 0:  # while the activations are on their way
        scale = gl.convert_layout(gl.rsqrt(gl.sum(squares, axis=0) / K + eps), gl.SliceLayout(1, ACC))
    acc, more_acc = multiply(
        xs, weights, more, x_at, weight_at, more_at, keep_x, turn, acc, more_acc,
        CHUNKS, BLOCK_K, W_AHEAD, X_AHEAD, TRAILING, RING, MORE, COPY,
    )  # fmt: skip
    place = (start_row, split, num_rows)
    store_columns(acc, scale, bias_ptr, out_ptr, first, place, N, PARTS > 0, BIAS, GATE)
    if MORE > 0:
        store_columns(more_acc, scale, bias_ptr, out_ptr, first + WIDE // PAIR, place, N, PARTS > 0, BIAS, GATE)


@gluon.jit
def meet(
    acc, box, rank, num_rows,
    ROWS: gl.constexpr, WIDE: gl.constexpr, CLUSTER: gl.constexpr, ACC: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """The sums of the cluster's parts acc [ROWS, WIDE], those of rows rank, rank + CLUSTER and so on: [ROWS / CLUSTER, WIDE].

    ``box``: 16 bytes of this program's shared memory and the room behind it; ``num_rows``: of acc that mean something. Others
    are not sent.
    """
    PITCH: gl.constexpr = WIDE + ROOM_PAD
    HEIGHT: gl.constexpr = ROWS // CLUSTER
    room = box + 16
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    col = gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC))
    theirs = place_in(row % CLUSTER, box + 0 * row)
    places = gl.expand_dims(theirs + (16 + 4 * PITCH * (rank * HEIGHT + row // CLUSTER)), 1) + gl.expand_dims(
        4 * col, 0
    )
    none = gl.expand_dims(0 * col, 0)
    send2(places, gl.expand_dims(theirs, 1) + none, acc, gl.expand_dims((row < num_rows).to(gl.int32), 1) + none)
    wait_mailbox(box)
    mine = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, SHARE))
    place = gl.expand_dims(room + 4 * PITCH * mine, 1) + gl.expand_dims(
        4 * gl.arange(0, WIDE, layout=gl.SliceLayout(0, SHARE)), 0
    )
    total = pull4(place)
    for part in gl.static_range(1, CLUSTER):
        total += pull4(place + 4 * PITCH * HEIGHT * part)
    return total


@gluon.jit
def meet_all(
    acc, box, rank, num_rows,
    ROWS: gl.constexpr, WIDE: gl.constexpr, CLUSTER: gl.constexpr, ACC: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """``meet``, also for a program that has all of K."""
    if CLUSTER > 1:
        return meet(acc, box, rank, num_rows, ROWS, WIDE, CLUSTER, ACC, SHARE)
    else:
        return gl.convert_layout(acc, SHARE)


@gluon.jit
def store_sum(total, residual, norm, residual_ptr, out_ptr, squares_ptr, at, keep, row, num_rows, FACTOR: gl.constexpr):
    """What is left of ``mid_add`` once total [rows, WIDE] is known; ``squares_ptr``: of this program, [T]."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    total = total.to(dtype).to(gl.float32)
    if FACTOR != 1.0:
        total = (total * FACTOR).to(dtype).to(gl.float32)
    narrow = (residual.to(gl.float32) + total).to(dtype)
    gl.store(residual_ptr + at, narrow, mask=keep)
    sums = gl.where(keep, narrow.to(gl.float32), 0.0)  # what the residual holds now, rounding included
    gl.store(out_ptr + at, (sums * gl.expand_dims(norm, 0)).to(dtype), mask=keep)
    gl.store(squares_ptr + row, gl.sum(sums * sums, axis=1), mask=row < num_rows)


@gluon.jit(do_not_specialize=["num_rows"])
def mid_add_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] when BIAS
    residual_ptr,  # [T, N], read and written
    norm_ptr,  # [N]
    out_ptr,  # [T, N]
    squares_ptr,  # f32 [programs over N, T]
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
    TRAILING: gl.constexpr,  # as in mid_linear_kernel
    RING: gl.constexpr,
    CLUSTER: gl.constexpr,
    BIAS: gl.constexpr,
    EARLY: gl.constexpr,
    FACTOR: gl.constexpr = 1.0,  # of the product
):
    """Grid: programs over N times CLUSTER parts of CHUNKS * BLOCK_K inputs each, 1, programs over T."""
    if EARLY:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    COPY: gl.constexpr = copy_layout(BLOCK_K, WARPS)
    ACC: gl.constexpr = product_layout(ROWS, WIDE, WARPS)
    SHARE: gl.constexpr = store_layout(ROWS // CLUSTER, WIDE, WARPS)
    rank = gl.program_id(0) % CLUSTER
    tile = gl.program_id(0) // CLUSTER
    turn = tile % CHUNKS
    start_row = gl.program_id(2) * ROWS
    box = 0
    if CLUSTER > 1:
        box = cluster_buffer(16 + 4 * ROWS * (WIDE + ROOM_PAD), CLUSTER)
        finished = (gl.minimum(num_rows - start_row, ROWS) - rank + CLUSTER - 1) // CLUSTER  # rows, by this program
        open_mailbox(box, finished * (CLUSTER * WIDE * 4))
    lane = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY)), 0) + rank * (CHUNKS * BLOCK_K)
    weight_at = weight_rows(weight_ptr, tile * WIDE, lane, N, K, WIDE, 1, COPY)
    token = start_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    x_at = x_ptr + gl.expand_dims(token * x_stride, 1) + lane
    keep_x = gl.expand_dims(token < num_rows, 1)  # other rows become zeros
    weights = buffers(x_ptr, least(W_AHEAD + 1 + TRAILING, CHUNKS), WIDE, BLOCK_K)
    xs = buffers(x_ptr, least(X_AHEAD + 1 + TRAILING, CHUNKS), ROWS, BLOCK_K)
    for i in gl.static_range(W_AHEAD):
        async_copy.async_copy_global_to_shared(weights[i], weight_at + chunk_start(i, turn, CHUNKS, BLOCK_K))
    async_copy.commit_group()
    row = start_row + rank + CLUSTER * gl.arange(0, ROWS // CLUSTER, layout=gl.SliceLayout(1, SHARE))
    col = tile * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, SHARE))
    norm = gl.load(norm_ptr + col, mask=col < N, other=0.0).to(gl.float32)
    if CLUSTER > 1:
        cluster_wait()
    if EARLY:
        gdc_wait()
    for i in gl.static_range(X_AHEAD):
        async_copy.async_copy_global_to_shared(xs[i], x_at + chunk_start(i, turn, CHUNKS, BLOCK_K), mask=keep_x)
        async_copy.commit_group()
    keep = gl.expand_dims(row < num_rows, 1) & gl.expand_dims(col < N, 0)
    at = gl.expand_dims(row * N, 1) + gl.expand_dims(col, 0)
    residual = gl.load(residual_ptr + at, mask=keep, other=0.0)
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout=ACC)
    acc, _ = multiply(
        xs, weights, weights, x_at, weight_at, weight_at, keep_x, turn, acc, acc,
        CHUNKS, BLOCK_K, W_AHEAD, X_AHEAD, TRAILING, RING, 0, COPY,
    )  # fmt: skip
    total = meet_all(acc, box, rank, num_rows - start_row, ROWS, WIDE, CLUSTER, ACC, SHARE)
    if BIAS:
        total += gl.expand_dims(gl.load(bias_ptr + col, mask=col < N, other=0.0).to(gl.float32), 0)
    at_squares = squares_ptr + tile * num_rows
    store_sum(total, residual, norm, residual_ptr, out_ptr, at_squares, at, keep, row, num_rows, FACTOR)
