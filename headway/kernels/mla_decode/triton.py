"""Triton kernels of ``mla_decode``: all heads of a row (64 at most), and its queries as far as there is room, share each
latent that is read; splits of a long row are weighed by a second kernel.

A latent's first L elements are a factor of both products, so a tile of latents is loaded once. Lengths are read on the device:
splits beyond a row's length, and parts beyond its tokens, end at once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.triton_early import start_next, wait_for_inputs
from headway.kernels.triton_math import widened

LOG2E = tl.constexpr(1.4426950408889634)
ROW_SEARCH = tl.constexpr(128)
"""Rows that a program looks at together."""


MERGED = tl.constexpr(8)
"""Splits that are weighed together: their loads wait for one another no more."""


@triton.jit
def row_of_token(token, query_start_ptr, num_rows):
    """The row that ``token`` belongs to; ``num_rows``: none."""
    row = token * 0
    for start in range(0, num_rows, ROW_SEARCH):
        i = start + tl.arange(0, ROW_SEARCH)
        end = tl.load(query_start_ptr + 1 + i, mask=i < num_rows, other=2147483647)
        row += tl.sum((end <= token).to(tl.int32), axis=0)
    return row


@triton.jit
def find_queries(
    unit, query_start_ptr, row_slots_ptr, seq_lens_ptr, selected_ptr, num_rows, num_slots, most_len, most_queries,
    most_selected, selected_stride, PARTS: tl.constexpr, BLOCK_Q: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """(token of the first query, number of queries, position of the first, keys that the last one sees, slot) of a program;
    without queries where it has nothing to do."""
    if SPARSE:
        row = row_of_token(unit, query_start_ptr, num_rows)
        part = 0
    else:
        row = unit // PARTS
        part = unit % PARTS
    inside = row < num_rows
    begin = tl.load(query_start_ptr + row, mask=inside, other=0)
    count = tl.load(query_start_ptr + row + 1, mask=inside, other=0) - begin
    slot = tl.load(row_slots_ptr + row, mask=inside, other=-1)
    seq_len = tl.minimum(tl.load(seq_lens_ptr + row, mask=inside, other=0), most_len)
    live = (slot >= 0) & (slot < num_slots) & (seq_len > 0)
    first = part * BLOCK_Q
    if SPARSE:
        first = unit - begin
    queries = tl.where(count <= most_queries, tl.maximum(tl.minimum(count - first, BLOCK_Q), 0), 0)
    position = seq_len - count + first
    keys = tl.where(live, tl.maximum(position + queries, 0), 0)
    if SPARSE:
        # Selected positions rise and have no gaps, so there are as many as the token sees, or as there is room for.
        keys = tl.minimum(keys, most_selected)
    return begin + first, queries, position, keys, tl.where(live, slot, 0)


@triton.jit
def weigh_parts(acc, total, best, top, parts):
    """Adds parts of a row: (weighed sum [N], sum of weights, greatest log) with ``parts`` [P, N] of base-2 logs ``top`` [P]."""
    new_best = tl.maximum(best, tl.max(top, axis=0))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(top - shift)
    decay = tl.exp2(best - shift)
    acc = acc * decay + tl.sum(parts * weight[:, None], axis=0)
    return acc, total * decay + tl.sum(weight, axis=0), new_best


@triton.jit
def split_plan(keys, num_splits, min_tiles, BLOCK_N: tl.constexpr):
    """(tiles, tiles of a split, splits in use) of so many keys."""
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    share = tl.maximum((tiles + num_splits - 1) // num_splits, min_tiles)
    return tiles, share, tl.maximum((tiles + share - 1) // share, 1)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_tokens", "num_slots", "num_blocks", "table_width", "num_splits", "min_tiles", "most_queries",
        "most_selected",
    ],
    do_not_specialize_on_alignment=["query_start_ptr", "row_slots_ptr", "seq_lens_ptr", "tables_ptr", "selected_ptr"],
)  # fmt: skip
def mla_decode_kernel(
    q_latent_ptr,  # [T, H, RANK]
    q_ptr,  # [T, H, D], its last ROTATED
    latents_ptr,  # [NB, BS, RANK + ROTATED]
    out_ptr,  # [H, T, RANK]
    partial_ptr,  # f32 [units * BLOCK_Q, H, num_splits, RANK]: queries that programs have room for, not tokens of long rows
    top_ptr,  # f32 [units * BLOCK_Q, H, num_splits], base-2 log of the split's sum of weights
    tables_ptr,  # [S, table_width]
    row_slots_ptr, query_start_ptr, seq_lens_ptr,
    selected_ptr,  # [T, most_selected], with SPARSE
    num_rows, num_tokens, num_slots, num_blocks, table_width, num_splits, min_tiles, most_queries, most_selected, scale,
    latent_token, latent_head, q_token, q_head, block_stride, offset_stride, selected_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,  # BLOCK_Q * BLOCK_H, 16 at least
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    SPARSE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per block of heads, part of a row (SPARSE: token) and split."""
    start_next(EARLY)
    unit, split = tl.program_id(1), tl.program_id(2)
    wait_for_inputs(EARLY)
    token, queries, position, keys, slot = find_queries(
        unit, query_start_ptr, row_slots_ptr, seq_lens_ptr, selected_ptr, num_rows, num_slots, table_width * BS,
        most_queries, most_selected, selected_stride, PARTS, BLOCK_Q, SPARSE,
    )  # fmt: skip
    _, share, used = split_plan(keys, num_splits, min_tiles, BLOCK_N)
    if (queries <= 0) | (split >= used):
        return
    member = tl.arange(0, BLOCK_M)
    query = member // BLOCK_H
    head = tl.program_id(0) * BLOCK_H + member % BLOCK_H
    mine = (query < queries) & (head < H)
    at_token = (token + query).to(tl.int64)
    dim = tl.arange(0, BLOCK_RANK)
    turn = tl.arange(0, BLOCK_ROTATED)
    in_rank, in_turn = dim < RANK, turn < ROTATED
    q_at = q_latent_ptr + at_token[:, None] * latent_token + head[:, None] * latent_head + dim[None, :]
    q_latent = tl.load(q_at, mask=mine[:, None] & in_rank[None, :], other=0.0)
    q_at = q_ptr + at_token[:, None] * q_token + head[:, None] * q_head + (D - ROTATED) + turn[None, :]
    q_turned = tl.load(q_at, mask=mine[:, None] & in_turn[None, :], other=0.0)
    table = tables_ptr + slot.to(tl.int64) * table_width
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin = split * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, keys)
    for start in range(begin, end, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        inside = entry < end
        key = entry
        if SPARSE:
            key = tl.load(selected_ptr + token.to(tl.int64) * selected_stride + entry, mask=inside, other=-1)
            inside = inside & (key >= 0) & (key < table_width * BS)
        block = tl.load(table + tl.where(inside, key, 0) // BS, mask=inside, other=0)
        block = tl.where((block >= 0) & (block < num_blocks), block, 0)
        place = latents_ptr + block.to(tl.int64) * block_stride + (tl.where(inside, key, 0) % BS) * offset_stride
        kept = tl.load(place[:, None] + dim[None, :], mask=inside[:, None] & in_rank[None, :], other=0.0)
        turned = tl.load(place[:, None] + RANK + turn[None, :], mask=inside[:, None] & in_turn[None, :], other=0.0)
        kept = widened(kept, q_latent.dtype)
        s = tl.dot(q_latent, tl.trans(kept), input_precision="ieee")
        s = tl.dot(q_turned, tl.trans(widened(turned, q_latent.dtype)), s, input_precision="ieee")
        seen = inside[None, :]
        if not SPARSE:
            seen = seen & (key[None, :] <= position + query[:, None])
        s = tl.where(seen, s * (scale * LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(s - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(kept.dtype), kept, acc * decay[:, None], input_precision="ieee")
        top = new_top
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    keep = mine[:, None] & in_rank[None, :]
    if used <= 1:
        out_at = out_ptr + (head.to(tl.int64) * num_tokens + at_token)[:, None] * RANK + dim[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        part = ((unit * BLOCK_Q + query).to(tl.int64) * H + head) * num_splits + split
        tl.store(partial_ptr + part[:, None] * RANK + dim[None, :], result, mask=keep)
        tl.store(top_ptr + part, top + tl.log2(total), mask=mine)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_tokens", "num_slots", "table_width", "num_splits", "min_tiles", "most_queries", "most_selected",
    ],
    do_not_specialize_on_alignment=["query_start_ptr", "row_slots_ptr", "seq_lens_ptr", "selected_ptr"],
)  # fmt: skip
def mla_merge_kernel(
    out_ptr, partial_ptr, top_ptr, row_slots_ptr, query_start_ptr, seq_lens_ptr, selected_ptr,
    num_rows, num_tokens, num_slots, table_width, num_splits, min_tiles, most_queries, most_selected, selected_stride,
    H: tl.constexpr,
    RANK: tl.constexpr,
    BS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    SPARSE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Weighs the splits of one query and head: a program per head and query that a part has room for."""
    start_next(EARLY)
    unit, nth = tl.program_id(1) // BLOCK_Q, tl.program_id(1) % BLOCK_Q
    head = tl.program_id(0).to(tl.int64)
    wait_for_inputs(EARLY)
    token, queries, _, keys, _ = find_queries(
        unit, query_start_ptr, row_slots_ptr, seq_lens_ptr, selected_ptr, num_rows, num_slots, table_width * BS,
        most_queries, most_selected, selected_stride, PARTS, BLOCK_Q, SPARSE,
    )  # fmt: skip
    _, _, used = split_plan(keys, num_splits, min_tiles, BLOCK_N)
    if (nth >= queries) | (used <= 1):
        return
    at = (token + nth).to(tl.int64)
    dim = tl.arange(0, BLOCK_RANK)
    in_rank = dim < RANK
    first = (tl.program_id(1).to(tl.int64) * H + head) * num_splits
    acc = tl.zeros([BLOCK_RANK], tl.float32)
    total = 0.0
    best = float("-inf")
    lane = tl.arange(0, MERGED)
    for start in range(0, used, MERGED):
        split = start + lane
        there = split < used
        top = tl.load(top_ptr + first + split, mask=there, other=float("-inf"))
        at_part = partial_ptr + (first + split)[:, None] * RANK + dim[None, :]
        part = tl.load(at_part, mask=there[:, None] & in_rank[None, :], other=0.0)
        acc, total, best = weigh_parts(acc, total, best, top, part)
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + (head * num_tokens + at) * RANK + dim, result.to(out_ptr.dtype.element_ty), mask=in_rank)
