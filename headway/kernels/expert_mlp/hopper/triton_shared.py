"""``expert_mlp`` for many pairs of a token and an expert in MXFP4: the products of ``expert_mlp.triton_grouped``.

A program has the outputs of all its warps and the pairs of one tile. Words of weights and activations lie in shared memory,
some steps ahead; each word is unpacked once, by the one warp that multiplies it, and is the first factor of a warpgroup's
product from the registers it was unpacked in. Activations are the second, read from shared memory by the product itself.

A group of 64 inputs is 16 words (see ``expert_mlp.packing``), whose first weights are its inputs 0 to 15, whose second ones are
16 to 31, and so on: in a product's order of inputs the four factors of a group stand one behind the other.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.expert_mlp.hopper.triton_words import REST, SHIFT, as_words, four
from headway.kernels.expert_mlp.triton_parts import activated

STEP = gl.constexpr(128)
"""Inputs of a step: two groups."""


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def tile_at(counts_ptr, tile, E: gl.constexpr, LANES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Expert of the ``tile``-th tile, E or more behind the last; its first sorted pair, and how many it has."""
    V: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lane = gl.arange(0, LANES, layout=V)
    counts = gl.load(counts_ptr + lane, mask=lane < E, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    expert = gl.sum((gl.associative_scan(tiles, 0, add) <= tile).to(gl.int32), axis=0)
    skipped = (tile - gl.sum(gl.where(lane < expert, tiles, 0), axis=0)) * ROWS
    first = gl.sum(gl.where(lane < expert, counts, 0), axis=0) + skipped
    count = gl.sum(gl.where(lane == expert, counts, 0), axis=0) - skipped
    return expert, first, count


@gluon.constexpr_function
def product_layout(warps, rows):
    """Sums [outputs, pairs]: a warp has 16 of every 16 * warps outputs."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])


@gluon.constexpr_function
def copy_layout(width, warps):
    """Threads over [rows, width] of 16 bits, 16 bytes of a row each."""
    lanes = width // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def words_layout(warps, height):
    """Words [outputs, groups, 16] of a step, as a product's first factor has a group."""
    registers = [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0]]
    size = 16 * warps
    while size < height:
        registers.append([size, 0, 0])
        size *= 2
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    places = [[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, places, [], [height, 2, 16])


@gluon.jit
def load_scales(scales_at, step, PAIRS: gl.constexpr):
    """Both scales of a step's groups, 16 bits a group: [outputs, groups]. ``scales_at``: pointers, and which group it is."""
    at, group = scales_at
    return gl.load(at + step * 2, mask=step * 2 + group < PAIRS, other=0)


@gluon.jit
def unpacked(words, scales, M: gl.constexpr, A: gl.constexpr, SPLIT: gl.constexpr):
    """bf16 [M, STEP], in the order of inputs, of a step's words [M, STEP / 4] and ``load_scales``' of it."""
    words = gl.convert_layout(gl.reshape(words, [M, 2, 16]), SPLIT)
    wide = scales.to(gl.uint16, bitcast=True).to(gl.int32)
    low = gl.expand_dims((((wide & 255) + SHIFT) << 7).to(gl.int16), 2)
    high = gl.expand_dims((((wide >> 8) + SHIFT) << 7).to(gl.int16), 2)
    low, _ = gl.broadcast(low, words)
    high, _ = gl.broadcast(high, words)
    a, b, c, d = four(words, low, high)
    quarters = gl.join(gl.join(a, b), gl.join(c, d))  # [M, 2, 16, 2, 2], of a group's quarters the second number first
    return gl.convert_layout(gl.reshape(gl.permute(quarters, [0, 1, 4, 3, 2]), [M, STEP]), A)


@gluon.jit
def start_copies(
    words, xs, weight_at, x_at, keep_x, step, stage, K: gl.constexpr, M: gl.constexpr, WORD_COPY: gl.constexpr,
    X_COPY: gl.constexpr,
):  # fmt: skip
    """Start copying a step's words and activations; beyond K both are zeros."""
    left = K - step * STEP
    word = gl.expand_dims(gl.arange(0, STEP // 4, layout=gl.SliceLayout(0, WORD_COPY)), 0)
    lane = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, X_COPY)), 0)
    every = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(1, WORD_COPY)) < M, 1)
    async_copy.async_copy_global_to_shared(
        words.index(stage), weight_at + step * (STEP // 4), mask=every & (word < left // 4)
    )
    async_copy.async_copy_global_to_shared(xs.index(stage), x_at + step * STEP, mask=keep_x & (lane < left))


@gluon.jit
def multiply(
    acc, words, xs, weight_at, scales_at, x_at, keep_x, K: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
    A: gl.constexpr, SPLIT: gl.constexpr, WORD_COPY: gl.constexpr, X_COPY: gl.constexpr,
):  # fmt: skip
    """``acc`` [M, rows] and all steps' products. A product runs while the next step's words are unpacked."""
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    for early in gl.static_range(STAGES - 1):
        start_copies(words, xs, weight_at, x_at, keep_x, early, early, K, M, WORD_COPY, X_COPY)
        async_copy.commit_group()
    scales = load_scales(scales_at, 0, K // 64)
    following = load_scales(scales_at, 1, K // 64)
    async_copy.wait_group(STAGES - 2)
    gl.thread_barrier()
    factor = unpacked(words.index(0).load(A), scales, M, A, SPLIT)
    for step in range(STEPS - 1):
        scales = following
        following = load_scales(scales_at, step + 2, K // 64)
        async_copy.wait_group(STAGES - 3)
        gl.thread_barrier()  # all see the next step's copies, and have read what the newest ones overwrite
        fence_async_shared()
        later = warpgroup_mma(factor, xs.index(step % STAGES).permute((1, 0)), acc, is_async=True)
        ahead = step + STAGES - 1
        start_copies(words, xs, weight_at, x_at, keep_x, ahead, ahead % STAGES, K, M, WORD_COPY, X_COPY)
        async_copy.commit_group()
        factor = unpacked(words.index((step + 1) % STAGES).load(A), scales, M, A, SPLIT)
        acc = warpgroup_mma_wait(0, deps=[later])
    async_copy.wait_group(0)
    gl.thread_barrier()
    fence_async_shared()
    later = warpgroup_mma(factor, xs.index((STEPS - 1) % STAGES).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[later])


@gluon.jit
def grouped_shared_kernel(
    x_ptr,  # FIRST: tokens [T, K]; else sorted rows [pairs, K]
    order_ptr,
    counts_ptr,
    weight_ptr,  # [E, N, K / 2]
    scales_ptr,  # [E, N, K / 32]
    bias_ptr,  # [E, N] or null
    out_ptr,  # FIRST: sorted rows [pairs, OUT]; else rows by pair
    x_stride,
    limit,
    alpha,
    E: gl.constexpr,
    LANES: gl.constexpr,
    OUT: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    ROWS: gl.constexpr,
    M: gl.constexpr,  # rows of weights: outputs, or half of them where gates have their ups beside them
    STAGES: gl.constexpr,
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    FIRST: gl.constexpr,
    EARLY: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, begin, count = tile_at(counts_ptr, gl.program_id(1), E, LANES, ROWS, WARPS)
    if expert >= E:
        return
    PAIRED: gl.constexpr = FIRST and GATED
    UNITS: gl.constexpr = M // 2 if PAIRED else M
    N: gl.constexpr = 2 * OUT if PAIRED else OUT
    SUMS: gl.constexpr = product_layout(WARPS, ROWS)
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    SPLIT: gl.constexpr = words_layout(WARPS, M)
    WORD_COPY: gl.constexpr = copy_layout(STEP // 4, WARPS)
    X_COPY: gl.constexpr = copy_layout(STEP, WARPS)
    first = gl.program_id(0) * UNITS
    row = expert.to(gl.int64) * N
    own = weight_row(gl.arange(0, M, layout=gl.SliceLayout(1, WORD_COPY)), first, OUT, PAIRED)
    word = gl.arange(0, STEP // 4, layout=gl.SliceLayout(0, WORD_COPY))
    weight_at = as_words(weight_ptr) + row * (K // 4) + (gl.expand_dims(own * (K // 4), 1) + gl.expand_dims(word, 0))
    SCALES: gl.constexpr = gl.SliceLayout(2, SPLIT)
    own = weight_row(gl.arange(0, M, layout=gl.SliceLayout(1, SCALES)), first, OUT, PAIRED)
    group = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, SCALES)), 0)
    scales_at = (as_words(scales_ptr) + row * (K // 64) + (gl.expand_dims(own * (K // 64), 1) + group), group)
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, X_COPY))
    source = begin + gl.where(lane < count, lane, 0)
    if FIRST:
        source = gl.load(order_ptr + source) // TOP_K
    col = gl.arange(0, STEP, layout=gl.SliceLayout(0, X_COPY))
    x_at = x_ptr + gl.expand_dims(source.to(gl.int64) * x_stride, 1) + gl.expand_dims(col, 0)
    keep_x = gl.expand_dims(lane < count, 1)  # other rows become zeros
    words = gl.allocate_shared_memory(gl.int16, [STAGES, M, STEP // 4], gl.NVMMASharedLayout(64, 16, 2))
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, ROWS, STEP], gl.NVMMASharedLayout(128, 16, 2))
    acc = gl.zeros([M, ROWS], gl.float32, layout=SUMS)
    acc = multiply(acc, words, xs, weight_at, scales_at, x_at, keep_x, K, M, STAGES, A, SPLIT, WORD_COPY, X_COPY)
    y = acc * REST
    up = y
    if PAIRED:
        y, up = gl.split(gl.permute(gl.reshape(y, [M // 16, 2, 8, ROWS]), [0, 2, 3, 1]))
        y = gl.reshape(y, [UNITS, ROWS])
        up = gl.reshape(up, [UNITS, ROWS])
    L: gl.constexpr = y.type.layout
    n = first + gl.arange(0, UNITS, layout=gl.SliceLayout(1, L))
    keep = gl.expand_dims(n < OUT, 1)
    if bias_ptr is not None:
        bias_at = bias_ptr + row + gl.expand_dims(n, 1)
        y += gl.load(bias_at, mask=keep, other=0.0).to(gl.float32)
        if PAIRED:
            up += gl.load(bias_at + OUT, mask=keep, other=0.0).to(gl.float32)
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    target = begin + lane
    if FIRST:
        y = activated(y, up, limit, alpha, ACT, GATED)
    else:
        target = gl.load(order_ptr + target, mask=lane < count, other=0)
    at = out_ptr + gl.expand_dims(target.to(gl.int64) * OUT, 0) + gl.expand_dims(n, 1)
    gl.store(at, y.to(out_ptr.dtype.element_ty), mask=keep & gl.expand_dims(lane < count, 0))


@gluon.jit
def weight_row(m, first, OUT: gl.constexpr, PAIRED: gl.constexpr):
    """An expert's row of weights that is a tile's ``m``-th: eight gates and their eight ups in turn; at most the last."""
    if PAIRED:
        return gl.minimum(first + m // 16 * 8 + m % 8, OUT - 1) + m // 8 % 2 * OUT
    else:
        return gl.minimum(first + m, OUT - 1)
