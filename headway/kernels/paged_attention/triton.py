"""Triton kernel of ``paged_attention`` for rows of several tokens, and what it shares with the decode kernel.

Both pack the query heads of one KV head into the rows of one matrix product, keep logits in base 2 (scale * log2 e is
folded into the exponent's multiply-add), and find their work from device lengths only. Grids come from host numbers,
so every launch can be captured in a CUDA graph and replayed at any length.

Online softmax: Milakov and Gimelshein 2018; tiling: Dao, FlashAttention-2, 2023; split-KV: Flash-Decoding, 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def base_2(logits, scale, soft_cap, CAPPED: tl.constexpr):
    """Scaled logits, capped with CAPPED, over ln 2."""
    if CAPPED:  # tanh(x) = 1 - 2 / (e^2x + 1)
        twice = tl.exp2(logits * (2.0 * LOG2E * scale / soft_cap))
        return (1.0 - 2.0 / (twice + 1.0)) * (soft_cap * LOG2E)
    else:
        return logits * (scale * LOG2E)


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
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of keys and values into the running softmax."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        logits = base_2(logits, scale, soft_cap, CAPPED)
        factor = 1.0
    else:  # folded into the exponent
        factor = scale * LOG2E
    if MASKED:
        seen = (position[None, :] <= q_position[:, None]) & (position < seq_len)[None, :]
        if WINDOWED:
            seen = seen & (position[None, :] > q_position[:, None] - window)
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
    block_stride,
    offset_stride,
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
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
            acc, total, top, q, q_position, k, v, position, seq_len, scale, window, soft_cap,
            MASKED, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        block = ahead
        position += BLOCK_N
    return acc, total, top


@triton.jit
def find_row(tile, query_start_ptr, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """The row that owns a flat tile number.

    Row r owns the tiles from (query_start[r] - first token) // BLOCK_Q + (r - first_row) on: at least as many as it
    needs, and no two rows overlap. Row ``num_rows`` stands for the padding tokens behind the last row.
    """
    count = 0
    for start in range(first_row, num_rows + 1, ROW_SEARCH):
        row = start + tl.arange(0, ROW_SEARCH)
        token = tl.load(query_start_ptr + row, mask=row <= num_rows, other=0)
        first_tile = tl.maximum(token - first_row, 0) // BLOCK_Q + row - first_row
        count += tl.sum(((row <= num_rows) & (first_tile <= tile)).to(tl.int32), axis=0)
    return tl.maximum(first_row + count - 1, first_row)


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "first_row", "window", "num_blocks", "num_slots"],
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr", "tables_ptr"],
)
def prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    out_ptr,  # [T, H, D]
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    num_tokens,
    num_rows,
    first_row,  # rows before it are decode rows, one token each
    num_slots,
    num_blocks,
    table_width,
    scale,
    window,
    soft_cap,
    q_stride,
    block_stride,
    offset_stride,
    head_stride,
    H: tl.constexpr,
    KH: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per KV head and tile of queries; late tiles, which see the most keys, start first."""
    GROUP: tl.constexpr = H // KH
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % KH
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KH
    row = find_row(tile, query_start_ptr, first_row, num_rows, BLOCK_Q)
    token = tl.load(query_start_ptr + row)
    token_end = tl.load(query_start_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    token_end = tl.minimum(token_end, num_tokens)
    num_queries = token_end - token
    first_query = (tile - (tl.maximum(token - first_row, 0) // BLOCK_Q + row - first_row)) * BLOCK_Q
    if (first_query >= num_queries) | (token < 0):
        return
    slot, seq_len = load_row(row, num_rows, row_slots_ptr, seq_lens_ptr, num_slots, table_width * BS)

    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = first_query + member // GROUP
    head = kv_head * GROUP + member % GROUP
    keep = ((member < BLOCK_Q * GROUP) & (query < num_queries))[:, None] & (dim < D)[None, :]
    at_token = (token + query).to(tl.int64)
    q = tl.load(q_ptr + (at_token * q_stride + head * D)[:, None] + dim[None, :], mask=keep, other=0.0)

    offset = seq_len - num_queries
    last_position = offset + tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    end = last_position + 1
    begin = 0
    full_begin = 0
    full_end = tl.maximum(offset + first_query + 1, 0) // BLOCK_N * BLOCK_N  # tiles before it lie below the diagonal
    q_position = offset + query
    k_head = k_ptr + kv_head * head_stride
    v_head = v_ptr + kv_head * head_stride
    table = tables_ptr + slot.to(tl.int64) * table_width
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if WINDOWED:  # tiles that some query's window cuts
        begin = tl.maximum(offset + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = (tl.maximum(last_position - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        acc, total, top = attend(
            acc, total, top, q, q_position, k_head, v_head, table,
            begin, tl.minimum(full_begin, end), seq_len, num_blocks, scale, window, soft_cap,
            block_stride, offset_stride, D, BS, BLOCK_N, BLOCK_D, True, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
    acc, total, top = attend(
        acc, total, top, q, q_position, k_head, v_head, table,
        full_begin, full_end, seq_len, num_blocks, scale, window, soft_cap, block_stride, offset_stride,
        D, BS, BLOCK_N, BLOCK_D, False, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    acc, total, top = attend(
        acc, total, top, q, q_position, k_head, v_head, table,
        tl.maximum(full_begin, full_end), end, seq_len, num_blocks, scale, window, soft_cap,
        block_stride, offset_stride, D, BS, BLOCK_N, BLOCK_D, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = (at_token * (H * D) + head * D)[:, None] + dim[None, :]
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=keep)
