"""Triton kernels of ``mla_gather`` and ``mla_prefill``: where the contexts of long rows lie is counted on the device, by each
program for itself."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import shared_limit
from headway.kernels.mla_prefill.tiles import choose_tile
from headway.kernels.paged_attention.triton import find_row
from headway.kernels.triton_math import widened

LOG2E = tl.constexpr(1.4426950408889634)
ROW_SEARCH = tl.constexpr(128)
"""Rows that a program looks at together."""
GATHERED = 16
"""Tokens of a program that gathers."""


@triton.jit
def context_lengths(row, query_start_ptr, seq_lens_ptr, num_rows, most_queries):
    """Context of each of ``row``: 0 for rows that are not long, or not there."""
    inside = row < num_rows
    begin = tl.load(query_start_ptr + row, mask=inside, other=0)
    count = tl.load(query_start_ptr + row + 1, mask=inside, other=0) - begin
    seq_len = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    return tl.where(count > most_queries, tl.maximum(seq_len - count, 0), 0)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_blocks", "table_width", "first", "size", "most_queries"],
    do_not_specialize_on_alignment=["tables_ptr", "row_slots_ptr", "query_start_ptr", "seq_lens_ptr"],
)
def mla_gather_kernel(
    latents_ptr,  # [NB, BS, WIDTH]
    piece_ptr,  # [size, WIDTH]
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    num_rows,
    num_slots,
    num_blocks,
    table_width,
    first,
    size,
    most_queries,
    block_stride,
    offset_stride,
    WIDTH: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    wanted = first + place
    row = place * 0
    begin = place * 0
    before = 0
    for start in range(0, num_rows, ROW_SEARCH):
        each = start + tl.arange(0, ROW_SEARCH)
        length = context_lengths(each, query_start_ptr, seq_lens_ptr, num_rows, most_queries)
        end = before + tl.cumsum(length, 0)
        passed = (end[None, :] <= wanted[:, None]) & (each < num_rows)[None, :]
        row += tl.sum(passed.to(tl.int32), axis=1)
        begin = tl.maximum(begin, tl.max(tl.where(passed, end[None, :], 0), axis=1))
        before += tl.sum(length, axis=0)
    real = (row < num_rows) & (place < size)
    position = tl.where(real, wanted - begin, 0)
    slot = tl.load(row_slots_ptr + row, mask=real, other=0)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, 0)
    entry = tl.minimum(position // BS, table_width - 1)
    block = tl.load(tables_ptr + slot.to(tl.int64) * table_width + entry, mask=real, other=0)
    block = tl.where((block >= 0) & (block < num_blocks), block, 0)
    source = latents_ptr + block.to(tl.int64) * block_stride + (position % BS) * offset_stride
    for start in range(0, WIDTH, BLOCK_W):
        dim = start + tl.arange(0, BLOCK_W)
        inside = (dim < WIDTH)[None, :]
        x = tl.load(source[:, None] + dim[None, :], mask=real[:, None] & inside, other=0.0)
        at = piece_ptr + place.to(tl.int64)[:, None] * WIDTH + dim[None, :]
        tl.store(at, widened(x, piece_ptr.dtype.element_ty), mask=(place < size)[:, None] & inside)


def mla_gather(
    latents: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    first: int,
    size: int,
    most_queries: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    num_blocks, block_size, width = latents.shape
    assert latents.stride(2) == 1 and block_tables.is_contiguous(), "rows and tables must be contiguous"
    piece = torch.empty((size, width), dtype=dtype, device=latents.device)
    mla_gather_kernel[(cdiv(size, GATHERED),)](
        latents, piece, block_tables, row_slots, query_start, seq_lens, row_slots.shape[0], block_tables.shape[0],
        num_blocks, block_tables.shape[1], first, size, most_queries, latents.stride(0), latents.stride(1),
        WIDTH=width, BS=block_size, BLOCK_T=GATHERED, BLOCK_W=min(128, next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return piece


@triton.jit
def fold_keys(
    state, q_nope, q_turned, kv_ptr, key_ptr, begin, end, query_place, scale, kv_token, key_token,
    NOPE: tl.constexpr, VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_NOPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) of one head into the running softmax; with CAUSAL each query sees those up to its own place."""
    acc, total, top = state
    nope, value, turn = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_ROTATED)
    for start in range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < end
        at = place.to(tl.int64)[:, None]
        k = tl.load(kv_ptr + at * kv_token + nope[None, :], mask=inside[:, None] & (nope < NOPE)[None, :], other=0.0)
        kr = tl.load(
            key_ptr + at * key_token + turn[None, :], mask=inside[:, None] & (turn < ROTATED)[None, :], other=0.0
        )
        v_at = kv_ptr + at * kv_token + NOPE + value[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (value < VALUE)[None, :], other=0.0)
        s = tl.dot(q_nope, tl.trans(k), input_precision="ieee")
        s = tl.dot(q_turned, tl.trans(kr), s, input_precision="ieee")
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (place[None, :] <= query_place[:, None])
        s = tl.where(seen, s * (scale * LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(s - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit(
    do_not_specialize=["num_tokens", "num_keys", "num_rows", "first", "most_queries"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr"],
)
def mla_prefill_kernel(
    q_ptr,  # [T, H, NOPE + ROTATED]
    kv_ptr,  # [N, H, NOPE + VALUE]
    key_ptr,  # [N, ROTATED]
    out_ptr,  # [T, H, VALUE]
    sums_ptr,  # f32 [T, H], with SUMS
    query_start_ptr,
    seq_lens_ptr,
    num_tokens,
    num_keys,
    num_rows,
    first,
    most_queries,
    scale,
    q_token,
    q_head,
    key_token,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    SUMS: tl.constexpr,
    CARRIED: tl.constexpr,
):
    """One program per head and tile of queries; late tiles, which see the most keys, start first."""
    head = tl.program_id(0) % H
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // H
    row, first_tile = find_row(tile, query_start_ptr, 0, num_rows, num_rows, BLOCK_Q)
    token = tl.load(query_start_ptr + row)
    token_end = tl.load(query_start_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    count = tl.minimum(token_end, num_tokens) - token
    first_query = (tile - first_tile) * BLOCK_Q
    owned = row < num_rows
    if (first_query >= count) | (token < 0) | (owned & (count <= most_queries)):
        return
    seq_len = tl.load(seq_lens_ptr + row, mask=owned, other=0)
    if CARRIED:
        if seq_len <= 0:
            return
    query = first_query + tl.arange(0, BLOCK_Q)
    mine = query < count
    at = (token + query).to(tl.int64)
    nope, value, turn = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_ROTATED)
    q_at = q_ptr + at[:, None] * q_token + head * q_head
    q_nope = tl.load(q_at + nope[None, :], mask=mine[:, None] & (nope < NOPE)[None, :], other=0.0)
    q_turned = tl.load(q_at + NOPE + turn[None, :], mask=mine[:, None] & (turn < ROTATED)[None, :], other=0.0)
    out_at = out_ptr + (at[:, None] * H + head) * VALUE + value[None, :]
    keep = mine[:, None] & (value < VALUE)[None, :]
    kv_head = kv_ptr + head * (NOPE + VALUE)
    kv_token: tl.constexpr = H * (NOPE + VALUE)
    if CARRIED:
        before = 0
        for start in range(0, row, ROW_SEARCH):
            each = start + tl.arange(0, ROW_SEARCH)
            before += tl.sum(context_lengths(each, query_start_ptr, seq_lens_ptr, row, most_queries), axis=0)
        begin = tl.maximum(before - first, 0)
        end = tl.minimum(before + tl.maximum(seq_len - count, 0) - first, num_keys)
        if begin >= end:
            return
        acc = tl.load(out_at, mask=keep, other=0.0).to(tl.float32)
        top = tl.load(sums_ptr + at * H + head, mask=mine, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc, total, top = fold_keys(
            (acc, total, top), q_nope, q_turned, kv_head, key_ptr, begin, end, query, scale, kv_token, key_token,
            NOPE, VALUE, ROTATED, BLOCK_N, BLOCK_NOPE, BLOCK_VALUE, BLOCK_ROTATED, False,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_Q, BLOCK_VALUE], tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        if owned & (seq_len > 0):
            diagonal = token + first_query // BLOCK_N * BLOCK_N  # keys before it are seen by all queries of the tile
            last = token + tl.minimum(first_query + BLOCK_Q, count)
            place = token + query
            acc, total, top = fold_keys(
                (acc, total, top), q_nope, q_turned, kv_head, key_ptr, token, diagonal, place, scale, kv_token, key_token,
                NOPE, VALUE, ROTATED, BLOCK_N, BLOCK_NOPE, BLOCK_VALUE, BLOCK_ROTATED, False,
            )  # fmt: skip
            acc, total, top = fold_keys(
                (acc, total, top), q_nope, q_turned, kv_head, key_ptr, diagonal, last, place, scale, kv_token, key_token,
                NOPE, VALUE, ROTATED, BLOCK_N, BLOCK_NOPE, BLOCK_VALUE, BLOCK_ROTATED, True,
            )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=keep)
    if SUMS:
        tl.store(sums_ptr + at * H + head, top + tl.log2(total), mask=mine)


def mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    key: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    first: int,
    most_queries: int,
    prefix_bound: int,
) -> None:
    num_tokens, heads, size = q.shape
    rotated = key.shape[1]
    nope, value = size - rotated, kv.shape[2] - (size - rotated)
    assert q.stride(2) == key.stride(1) == 1 and kv.is_contiguous() and out.is_contiguous(), "rows must be contiguous"
    if not num_tokens:
        return
    blocks = [max(16, next_power_of_2(each)) for each in (nope, value, rotated)]
    tile = choose_tile(blocks[0] + blocks[2], blocks[1], q.itemsize, num_tokens, shared_limit(q.device))
    num_rows = seq_lens.shape[0]
    num_tiles = num_tokens // tile.block_q + num_rows + 1  # see find_row
    mla_prefill_kernel[(num_tiles * heads,)](
        q, kv, key, out, out if sums is None else sums, query_start, seq_lens, num_tokens, kv.shape[0], num_rows,
        first, most_queries, scale, q.stride(0), q.stride(1), key.stride(0),
        H=heads, NOPE=nope, VALUE=value, ROTATED=rotated, BLOCK_Q=tile.block_q, BLOCK_N=tile.block_n,
        BLOCK_NOPE=blocks[0], BLOCK_VALUE=blocks[1], BLOCK_ROTATED=blocks[2], SUMS=sums is not None, CARRIED=first >= 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
