"""``expert_mlp`` for many pairs of a token and an expert: sorted by expert, and multiplied tile by tile on tensor cores.

Four kernels. ``sort_kernel`` has a program for each expert, which finds where its pairs begin by counting those of experts
before it, and writes them down in their order: nothing is added atomically, so the order is one. Pairs are cut into parts, of
which a warp's lanes read 32 pairs at a time: counting within a part waits for no other warp. ``grouped_kernel`` does the
products in, from gathered tokens to sorted rows, and then the products out, from these to rows by pair. ``combine_kernel`` adds
a token's rows, in the order of its choice. A program finds its tile in the counts of all experts; there are as many programs as
there could be tiles, and those behind the last do nothing.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.expert_mlp.triton_parts import (
    activated,
    as_words,
    first_of_word,
    load_scales,
    load_weight,
    unpacked,
)
from headway.kernels.triton_early import start_next, wait_for_inputs


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(
    ids_ptr,  # [num_pairs]
    order_ptr,  # int32 [num_pairs]: pairs by expert; behind the last that has one nothing is written
    counts_ptr,  # int32 [E]
    num_pairs,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    expert = tl.program_id(0)
    length = tl.cdiv(num_pairs, PARTS)
    part = tl.arange(0, PARTS)[None, :]
    end = tl.minimum((part + 1) * length, num_pairs)
    at = part * length + tl.arange(0, 32)[:, None]
    earlier = tl.zeros([32, PARTS], tl.int32)
    mine = tl.zeros([32, PARTS], tl.int32)
    wait_for_inputs(EARLY)
    for start in range(0, length, 32):
        ids = tl.load(ids_ptr + start + at, mask=start + at < end, other=-1)
        earlier += ((ids >= 0) & (ids < expert)).to(tl.int32)
        mine += (ids == expert).to(tl.int32)
    counts = tl.sum(mine, axis=0)
    place = tl.sum(tl.sum(earlier, axis=0), axis=0) + tl.cumsum(counts, axis=0) - counts
    tl.store(counts_ptr + expert, tl.sum(counts, axis=0))
    for start in range(0, length, 32):
        ids = tl.load(ids_ptr + start + at, mask=start + at < end, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + place[None, :] + tl.cumsum(mine, axis=0) - 1, start + at, mask=mine > 0)
        place += tl.sum(mine, axis=0)


@triton.jit
def tile_at(counts_ptr, tile, E: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Expert of the ``tile``-th tile, E or more behind the last; its first sorted pair, and how many there are from it on."""
    lane = tl.arange(0, LANES)
    counts = tl.load(counts_ptr + lane, mask=lane < E, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    skipped = (tile - tl.sum(tl.where(lane < expert, tiles, 0), axis=0)) * ROWS
    first = tl.sum(tl.where(lane < expert, counts, 0), axis=0) + skipped
    count = tl.sum(tl.where(lane == expert, counts, 0), axis=0) - skipped
    return expert, first, count


@triton.jit
def write_plan(
    plan_ptr, counts_ptr, tile, expert, first, count, E: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    """What ``tile_at`` has found for the ``tile``-th tile, for ``hopper.triton_many``. Of no pairs there is a tile of none."""
    at = plan_ptr + 4 * (tile + 1)
    tl.store(at, tl.minimum(expert, E - 1))
    tl.store(at + 1, first)
    tl.store(at + 2, count)
    if tile == 0:
        lane = tl.arange(0, LANES)
        counts = tl.load(counts_ptr + lane, mask=lane < E, other=0)
        tl.store(plan_ptr, tl.maximum(tl.sum((counts + ROWS - 1) // ROWS, axis=0), 1))


@triton.jit
def product(
    x_at, keep_x, weight_ptr, scales_ptr, row, keep, factor, WEIGH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FP4: tl.constexpr, row2, PAIRED: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, BLOCK_N] twice: x times weight rows ``row``, and with PAIRED times ``row2``."""
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc2 = tl.zeros([ROWS, BLOCK_N], tl.float32)
    if FP4:
        WIDE: tl.constexpr = BLOCK_K // 2
        words: tl.constexpr = K // 4
        lane = tl.arange(0, WIDE)[None, :]
        for start in range(0, words, WIDE):
            col = start + lane
            packed = load_weight(as_words(weight_ptr) + row * words, col, keep, words, WIDE)
            packed2 = packed
            if PAIRED:
                packed2 = load_weight(as_words(weight_ptr) + row2 * words, col, keep, words, WIDE)
            for nth in tl.static_range(4):
                x = tl.load(x_at + first_of_word(col) + 16 * nth, mask=keep_x & (col < words), other=0.0)
                if WEIGH:
                    x = (x.to(tl.float32) * factor).to(x.dtype)
                at = scales_ptr + row * (K // 32)
                scales = load_scales(at, start // 16, nth // 2, keep, K // 64, WIDE // 16)
                weight = unpacked(packed, scales, nth, BLOCK_N, WIDE).to(x.dtype)
                acc = tl.dot(x, weight.T, acc, input_precision="ieee")
                if PAIRED:
                    at = scales_ptr + row2 * (K // 32)
                    scales = load_scales(at, start // 16, nth // 2, keep, K // 64, WIDE // 16)
                    weight = unpacked(packed2, scales, nth, BLOCK_N, WIDE).to(x.dtype)
                    acc2 = tl.dot(x, weight.T, acc2, input_precision="ieee")
    else:
        lane = tl.arange(0, BLOCK_K)[None, :]
        for start in range(0, K, BLOCK_K):
            x = load_weight(x_at, start + lane, keep_x, K, BLOCK_K)
            if WEIGH:
                x = (x.to(tl.float32) * factor).to(x.dtype)
            weight = load_weight(weight_ptr + row * K, start + lane, keep, K, BLOCK_K)
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")
            if PAIRED:
                weight = load_weight(weight_ptr + row2 * K, start + lane, keep, K, BLOCK_K)
                acc2 = tl.dot(x, weight.T, acc2, input_precision="ieee")
    return acc, acc2


@triton.jit(do_not_specialize=["group"])
def grouped_kernel(
    x_ptr,  # FIRST: tokens [T, K]; else sorted rows [pairs, K]
    order_ptr,
    counts_ptr,
    weights_ptr,  # f32 [pairs]
    weight_ptr,  # [E, N, K]
    scales_ptr,
    bias_ptr,  # [E, N] or null
    out_ptr,  # FIRST: sorted rows [pairs, OUT]; else rows by pair
    plan_ptr,  # int32 [1 + rows of tiles, 4] or null: how many rows; of each its expert, first sorted pair, pairs from there on
    x_stride,
    limit,
    alpha,
    group,  # rows of tiles that go through their weights together
    E: tl.constexpr,
    LANES: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    WEIGH: tl.constexpr,
    FP4: tl.constexpr,
    FIRST: tl.constexpr,
    TOGETHER: tl.constexpr,  # gates and their ups are one factor, side by side
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    wait_for_inputs(EARLY)
    tile, column = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), group)
    expert, first, count = tile_at(counts_ptr, tile, E, LANES, ROWS)
    if plan_ptr is not None:
        if column == 0:
            write_plan(plan_ptr, counts_ptr, tile, expert, first, count, E, LANES, ROWS)
    if expert >= E:
        return
    lane = tl.arange(0, ROWS)
    there = lane < count
    pair = tl.load(order_ptr + first + lane, mask=there, other=0)
    source = pair // TOP_K if FIRST else first + lane
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = n < OUT
    PAIRED: tl.constexpr = FIRST and GATED
    N: tl.constexpr = 2 * OUT if PAIRED else OUT
    row = expert.to(tl.int64) * N + n
    factor = tl.load(weights_ptr + pair, mask=there, other=0.0)[:, None] if WEIGH and FIRST else 1.0
    x_at = x_ptr + source.to(tl.int64)[:, None] * x_stride
    if TOGETHER:
        wide = tl.arange(0, 2 * BLOCK_N)
        unit = column * BLOCK_N + wide // 2
        both = (expert.to(tl.int64) * N + unit + wide % 2 * OUT)[:, None]
        y, _ = product(
            x_at, there[:, None], weight_ptr, scales_ptr, both, (unit < OUT)[:, None], factor, WEIGH, K, ROWS, 2 * BLOCK_N,
            BLOCK_K, FP4, both, False,
        )  # fmt: skip
        y, up = tl.split(tl.reshape(y, (ROWS, BLOCK_N, 2)))
    else:
        y, up = product(
            x_at, there[:, None], weight_ptr, scales_ptr, row[:, None], keep[:, None], factor, WEIGH and FIRST, K, ROWS,
            BLOCK_N, BLOCK_K, FP4, (row + OUT)[:, None], PAIRED,
        )  # fmt: skip
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=keep, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            up += tl.load(bias_ptr + row + OUT, mask=keep, other=0.0).to(tl.float32)[None, :]
    target = pair
    if FIRST:
        y = activated(y, up, limit, alpha, ACT, GATED)
        target = first + lane
    at = out_ptr + target.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=there[:, None] & keep[None, :])


@triton.jit
def combine_kernel(
    found_ptr,  # [T * TOP_K, N]
    ids_ptr,
    weights_ptr,
    out_ptr,  # [T, N]
    E: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGH: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs(EARLY)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids_ptr + pair)
        there = (expert >= 0) & (expert < E)
        y = tl.load(found_ptr + pair * N + n, mask=(n < N) & there, other=0.0).to(tl.float32)
        if not WEIGH:
            y = tl.where(there, y * tl.load(weights_ptr + pair), 0.0)
        total += y
    tl.store(out_ptr + token * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)
