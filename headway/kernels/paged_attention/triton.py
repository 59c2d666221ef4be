"""Triton kernels of ``paged_attention``: split-KV decode and tiled prefill.

They pack the query heads of one KV head into the rows of one matrix product, keep logits in base 2 (scale * log2 e is
folded into the exponent's multiply-add), and find their work from device lengths only. Grids come from host numbers,
so every launch can be captured in a CUDA graph and replayed at any length.

Online softmax: Milakov and Gimelshein 2018; tiling: Dao, FlashAttention-2, 2023; split-KV: Flash-Decoding, 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.paged_attention.triton_split import (
    clear_idle,
    counted_plan,
    lowest_seen,
    own_heads,
    row_tokens,
    sink_weight,
    split_plan,
    weigh_splits,
)
from headway.kernels.triton_early import start_next, wait_for_inputs
from headway.kernels.triton_math import load_queries

LOG2E = tl.constexpr(1.4426950408889634)
ROW_SEARCH = tl.constexpr(256)


@triton.jit
def load_row(row, num_rows, row_slots_ptr, seq_lens_ptr, num_slots, capacity):
    """(slot, length) of a row; length 0 for rows without a valid slot, slot always safe to index with."""
    slot = tl.load(row_slots_ptr + row, mask=row < num_rows, other=-1)
    length = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    known = (slot >= 0) & (slot < num_slots)
    return tl.where(known, slot, 0), tl.where(known, tl.minimum(length, capacity), 0)


@triton.jit
def load_slopes(slopes_ptr, head, keep, BLOCK_M: tl.constexpr, BIASED: tl.constexpr):
    """f32 [BLOCK_M], slopes of heads over ln 2."""
    if BIASED:
        return tl.load(slopes_ptr + head, mask=keep, other=0.0) * LOG2E
    return tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def fold(
    acc,  # f32 [M, BLOCK_D], sum of weights times values, relative to top
    total,  # f32 [M], sum of weights, relative to top
    top,  # f32 [M], running maximum of the base-2 logits
    q,  # [M, BLOCK_D]
    q_position,  # int32 [M]
    k,  # [BLOCK_N, BLOCK_D]
    v,
    position,  # int32 [BLOCK_N], of the keys
    seq_len,
    scale,
    window,
    soft_cap,
    slope,  # f32 [M], over ln 2; with BIASED
    MASKED: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of keys and values into the running softmax."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:  # tanh(x) = 1 - 2 / (e^2x + 1)
        twice = tl.exp2(logits * (2.0 * LOG2E * scale / soft_cap))
        logits = (1.0 - 2.0 / (twice + 1.0)) * (soft_cap * LOG2E)
        factor = 1.0
    else:
        factor = scale * LOG2E
    if BIASED:
        logits = logits * factor + slope[:, None] * (position[None, :] - q_position[:, None]).to(tl.float32)
        factor = 1.0
    if MASKED:
        seen = (position[None, :] <= q_position[:, None]) & (position < seq_len)[None, :]
        if REACH > 0:
            seen = seen & (position[None, :] >= lowest_seen(q_position, window, REACH)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1) * factor)
    shift = new_top
    if MASKED:  # a row that has seen nothing yet
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits * factor - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, total, new_top


@triton.jit
def attend(
    acc,  # f32 [M, BLOCK_D], sum of weights times values, relative to top
    total,  # f32 [M], sum of weights, relative to top
    top,  # f32 [M], running maximum of the base-2 logits
    q,  # [M, BLOCK_D]
    q_position,  # int32 [M]
    k_ptr,  # at the KV head
    v_ptr,
    table,  # the row's block ids
    begin,
    end,
    seq_len,
    num_blocks,
    scale,
    window,
    soft_cap,
    slope,
    block_stride,
    offset_stride,
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys of positions [begin, end) in; unmasked tiles must be seen whole by every row."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    # Block ids are fetched one tile ahead: a load that waits for a load would halve the depth of the software pipeline.
    position = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + position // BS, mask=position < seq_len, other=0)
    for _ in range(begin, end, BLOCK_N):
        ahead = tl.load(table + (position + BLOCK_N) // BS, mask=position + BLOCK_N < seq_len, other=0)
        block = tl.where((block >= 0) & (block < num_blocks), block, 0).to(tl.int64)
        place = (block * block_stride + (position % BS) * offset_stride)[:, None] + dim
        if MASKED:
            keep = (position < seq_len)[:, None] & (dim < D)
            k = tl.load(k_ptr + place, mask=keep, other=0.0)
            v = tl.load(v_ptr + place, mask=keep, other=0.0)
        elif D < BLOCK_D:
            k = tl.load(k_ptr + place, mask=dim < D, other=0.0)
            v = tl.load(v_ptr + place, mask=dim < D, other=0.0)
        else:
            k = tl.load(k_ptr + place)
            v = tl.load(v_ptr + place)
        acc, total, top = fold(
            acc, total, top, q, q_position, k, v, position, seq_len, scale, window, soft_cap, slope,
            MASKED, REACH, CAPPED, BIASED, PRECISION,
        )  # fmt: skip
        block = ahead
        position += BLOCK_N
    return acc, total, top


@triton.jit
def cache_place(table, position, keep, num_blocks, block_stride, offset_stride, BS: tl.constexpr):
    """Where the keys (or values) of these positions begin in a head's cache; a safe place where not ``keep``."""
    block = tl.load(table + position // BS, mask=keep, other=0)
    block = tl.where((block >= 0) & (block < num_blocks), block, 0).to(tl.int64)
    return block * block_stride + (position % BS) * offset_stride


@triton.jit
def load_stored(
    k_ptr, v_ptr, table, position, newest, num_blocks, block_stride, offset_stride,
    D: tl.constexpr, BS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(keys, values) [BLOCK_N, BLOCK_D] of a decode row that earlier steps wrote: those before its newest token."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    stored = position < newest
    place = cache_place(table, position, stored, num_blocks, block_stride, offset_stride, BS)[:, None] + dim
    keep = stored[:, None] & (dim < D)
    return tl.load(k_ptr + place, mask=keep, other=0.0), tl.load(v_ptr + place, mask=keep, other=0.0)


@triton.jit
def add_newest(
    k, v, k_ptr, v_ptr, table, position, newest, holds, num_blocks, block_stride, offset_stride,
    D: tl.constexpr, BS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The tile with the newest token's key and value, if this is the tile that ``holds`` it."""
    dim = tl.arange(0, BLOCK_D)
    place = cache_place(table, newest, holds, num_blocks, block_stride, offset_stride, BS) + dim
    new_k = tl.load(k_ptr + place, mask=holds & (dim < D), other=0.0)
    new_v = tl.load(v_ptr + place, mask=holds & (dim < D), other=0.0)
    here = (position == newest)[:, None]
    return tl.where(here, new_k[None, :], k), tl.where(here, new_v[None, :], v)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_tokens", "num_splits", "min_tiles", "busy", "window", "num_blocks", "num_slots",
    ],
    do_not_specialize_on_alignment=[
        "row_slots_ptr", "seq_lens_ptr", "tables_ptr", "arrivals_ptr", "decode_rows_ptr", "query_start_ptr",
    ],
)  # fmt: skip
def decode_kernel(
    q_ptr,  # [T, H, D]
    k_ptr, v_ptr,  # [NB, BS, KH, D]
    out_ptr,  # [T, H, D]
    partial_ptr, top_ptr,  # f32 [T, H, num_splits, D]; [T, H, num_splits], base-2 log of the split's sum of weights
    arrivals_ptr, tables_ptr,  # int32 [R, KH], zero before and after: splits of the row that are done; [S, table_width]
    row_slots_ptr, seq_lens_ptr, decode_rows_ptr,  # [R], [R], [1], with COUNTED: rows from there on are left alone
    query_start_ptr,  # [R + 1], with WIDTH > 1
    num_rows, num_tokens, num_slots, num_blocks, table_width, num_splits, min_tiles,
    busy,  # programs that the device takes side by side, for COUNTED
    scale, window, soft_cap,  # a window or chunk, see REACH
    sinks_ptr, slopes_ptr,  # f32 [H], with SINKS and BIASED
    q_stride, block_stride, offset_stride, head_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, WIDTH: tl.constexpr,  # tokens of a row at most
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MEMBERS: tl.constexpr,  # WIDTH * GROUP, rounded up
    REACH: tl.constexpr,  # 0: all keys, 1: a window, 2: a chunk
    CAPPED: tl.constexpr, SINKS: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    HOLD: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per KV head, row and split. A row that needs one split writes its output, else a partial result, and
    the program that is done last weighs them all; their order does not depend on which it is.

    With ``HOLD`` it fetches its first tile before it waits for the queries; only the newest key and value are missing then.
    """
    start_next(EARLY)
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mine, most_splits = row >= 0, num_splits
    if COUNTED:
        mine, row, split, min_tiles, most_splits = counted_plan(
            row, split, decode_rows_ptr, busy, min_tiles, num_splits
        )
    slot, seq_len = load_row(row, num_rows, row_slots_ptr, seq_lens_ptr, num_slots, table_width * BS)
    token, count = row_tokens(query_start_ptr, row, WIDTH)
    seq_len = tl.where(seq_len < count, 0, seq_len)
    first, tiles, share, used = split_plan(seq_len, seq_len - count, window, min_tiles, most_splits, BLOCK_N, REACH)
    if (split >= tl.maximum(used, 1)) | (not mine):
        wait_for_inputs(EARLY)
        return
    dim = tl.arange(0, BLOCK_D)
    table = tables_ptr + slot.to(tl.int64) * table_width
    k_head, v_head = k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride
    begin = (first + split * share) * BLOCK_N
    end = tl.minimum((first + tl.minimum(split * share + share, tiles)) * BLOCK_N, seq_len)
    newest = seq_len - 1
    member = tl.arange(0, BLOCK_M)
    head, step = own_heads(member, kv_head, GROUP, WIDTH)
    real = member < count * GROUP  # the row's tokens, the heads of one behind those of another
    keep = real[:, None] & (dim < D)[None, :]
    inside = token * q_stride + (step * q_stride + head * D)[:, None] + dim[None, :]
    q_position = seq_len - count + step
    slope = load_slopes(slopes_ptr, head, real, BLOCK_M, BIASED)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HOLD:
        position = begin + tl.arange(0, BLOCK_N)
        k, v = load_stored(
            k_head, v_head, table, position, newest, num_blocks, block_stride, offset_stride, D, BS, BLOCK_D
        )
        wait_for_inputs(EARLY)
        q = load_queries(q_ptr + inside, keep, k_ptr.dtype.element_ty)
        k, v = add_newest(
            k, v, k_head, v_head, table, position, newest, (newest >= begin) & (newest < begin + BLOCK_N),
            num_blocks, block_stride, offset_stride, D, BS, BLOCK_D,
        )  # fmt: skip
        acc, total, top = fold(
            acc, total, top, q, q_position, k, v, position, seq_len, scale, window, soft_cap, slope,
            True, REACH, CAPPED, BIASED, PRECISION,
        )  # fmt: skip
        begin += BLOCK_N
    else:
        wait_for_inputs(EARLY)
        q = load_queries(q_ptr + inside, keep, k_ptr.dtype.element_ty)
    if WIDTH > 1:
        if split == 0:
            clear_idle(
                out_ptr, query_start_ptr, row, num_rows, num_tokens, kv_head, H, GROUP, D, WIDTH, BLOCK_M, BLOCK_D
            )
    acc, total, top = attend(
        acc, total, top, q, q_position, k_head, v_head, table,
        begin, end, seq_len, num_blocks, scale, window, soft_cap, slope, block_stride, offset_stride,
        D, BS, BLOCK_N, BLOCK_D, True, REACH, CAPPED, BIASED, PRECISION,
    )  # fmt: skip
    if SINKS and used <= 1:
        total += sink_weight(sinks_ptr, head, real, top)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if used <= 1:
        place = token * (H * D) + (step * H + head)[:, None] * D + dim[None, :]
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        part = (token * H + step * H + head) * num_splits + split
        tl.store(partial_ptr + part[:, None] * D + dim[None, :], result, mask=keep)
        tl.store(top_ptr + part, top + tl.log2(total), mask=real)
        tl.debug_barrier()  # all threads' parts are stored before one thread says so
        arrival = arrivals_ptr + row * (H // GROUP) + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
            tl.store(arrival, 0)
            weigh_splits(out_ptr, partial_ptr, top_ptr, token * H + kv_head * GROUP, count * GROUP, used, num_splits,
                         sinks_ptr + kv_head * GROUP, H, GROUP, D, MEMBERS, BLOCK_D, SINKS)  # fmt: skip


@triton.jit
def find_row(tile, query_start_ptr, first_row, most_rows, num_rows, BLOCK_Q: tl.constexpr):
    """(the row that owns a flat tile number, its first tile).

    Of the ``most_rows`` rows from ``first_row`` on, the i-th owns the tiles from (its first token - first_row) // BLOCK_Q + i
    on: at least as many as it needs, and no two rows overlap. The padding tokens behind the last row come after all of them,
    as row ``num_rows``.
    """
    count = 0
    for start in range(0, most_rows + 1, ROW_SEARCH):
        i = start + tl.arange(0, ROW_SEARCH)
        row = tl.where(i < most_rows, first_row + i, num_rows)
        token = tl.load(query_start_ptr + row, mask=i <= most_rows, other=0)
        first_tile = tl.maximum(token - first_row, 0) // BLOCK_Q + i
        count += tl.sum(((i <= most_rows) & (first_tile <= tile)).to(tl.int32), axis=0)
    i = tl.maximum(count - 1, 0)
    row = tl.where(i < most_rows, first_row + i, num_rows)
    return row, tl.maximum(tl.load(query_start_ptr + row) - first_row, 0) // BLOCK_Q + i


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_decode_rows", "window", "num_blocks", "num_slots"],
    do_not_specialize_on_alignment=[
        "row_slots_ptr", "query_start_ptr", "seq_lens_ptr", "tables_ptr", "decode_rows_ptr",
    ],
)  # fmt: skip
def prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    out_ptr,  # [T, H, D]
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    decode_rows_ptr,  # [1], with COUNTED
    num_tokens,
    num_rows,
    num_decode_rows,  # at most, with COUNTED
    num_slots,
    num_blocks,
    table_width,
    scale,
    window,  # or chunk, see REACH
    soft_cap,
    sinks_ptr,  # f32 [H], with SINKS
    slopes_ptr,  # f32 [H], with BIASED
    q_stride,
    block_stride,
    offset_stride,
    head_stride,
    H: tl.constexpr,
    KH: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    REACH: tl.constexpr,  # 0: all keys, 1: a window, 2: a chunk
    CAPPED: tl.constexpr, SINKS: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """One program per KV head and tile of queries; late tiles, which see the most keys, start first."""
    GROUP: tl.constexpr = H // KH
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % KH
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KH
    first_row = num_decode_rows
    if COUNTED:
        first_row = tl.maximum(tl.minimum(tl.load(decode_rows_ptr), num_decode_rows), 0)
    row, first_tile = find_row(tile, query_start_ptr, first_row, num_rows - num_decode_rows, num_rows, BLOCK_Q)
    token = tl.load(query_start_ptr + row)
    token_end = tl.load(query_start_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    token_end = tl.minimum(token_end, num_tokens)
    num_queries = token_end - token
    first_query = (tile - first_tile) * BLOCK_Q
    if (first_query >= num_queries) | (token < 0):
        return
    slot, seq_len = load_row(row, num_rows, row_slots_ptr, seq_lens_ptr, num_slots, table_width * BS)

    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = first_query + member // GROUP
    head = kv_head * GROUP + member % GROUP
    keep = ((member < BLOCK_Q * GROUP) & (query < num_queries))[:, None] & (dim < D)[None, :]
    at_token = (token + query).to(tl.int64)
    q = load_queries(q_ptr + (at_token * q_stride + head * D)[:, None] + dim[None, :], keep, k_ptr.dtype.element_ty)

    offset = seq_len - num_queries
    last_position = offset + tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    end = last_position + 1
    begin = 0
    full_begin = 0
    full_end = tl.maximum(offset + first_query + 1, 0) // BLOCK_N * BLOCK_N  # tiles before it lie below the diagonal
    q_position = offset + query
    slope = load_slopes(slopes_ptr, head, member < BLOCK_Q * GROUP, BLOCK_M, BIASED)
    k_head = k_ptr + kv_head * head_stride
    v_head = v_ptr + kv_head * head_stride
    table = tables_ptr + slot.to(tl.int64) * table_width
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if REACH > 0:  # tiles that some query's window or chunk cuts
        begin = lowest_seen(offset + first_query, window, REACH) // BLOCK_N * BLOCK_N
        full_begin = (lowest_seen(last_position, window, REACH) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        acc, total, top = attend(
            acc, total, top, q, q_position, k_head, v_head, table,
            begin, tl.minimum(full_begin, end), seq_len, num_blocks, scale, window, soft_cap, slope,
            block_stride, offset_stride, D, BS, BLOCK_N, BLOCK_D, True, REACH, CAPPED, BIASED, PRECISION,
        )  # fmt: skip
    acc, total, top = attend(
        acc, total, top, q, q_position, k_head, v_head, table,
        full_begin, full_end, seq_len, num_blocks, scale, window, soft_cap, slope, block_stride, offset_stride,
        D, BS, BLOCK_N, BLOCK_D, False, REACH, CAPPED, BIASED, PRECISION,
    )  # fmt: skip
    acc, total, top = attend(
        acc, total, top, q, q_position, k_head, v_head, table,
        tl.maximum(full_begin, full_end), end, seq_len, num_blocks, scale, window, soft_cap, slope,
        block_stride, offset_stride, D, BS, BLOCK_N, BLOCK_D, True, REACH, CAPPED, BIASED, PRECISION,
    )  # fmt: skip
    if SINKS:
        total += sink_weight(sinks_ptr, head, member < BLOCK_Q * GROUP, top)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = (at_token * (H * D) + head * D)[:, None] + dim[None, :]
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=keep)
