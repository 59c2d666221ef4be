"""Triton kernel of ``span_attention``: a program takes a block of one row's queries, of all heads that share a key head, and
goes over the row's keys once, from the first that its window reaches to the furthest end of its queries.

Queries of one key head lie together in a tile ([queries x heads that share, D]), so that rows of a single token, of which a
step
with a picture has many, do not read keys once per head. Softmax runs over blocks of keys with a running maximum and sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "num_blocks", "table_width", "window"],
    do_not_specialize_on_alignment=["ends_ptr"],
)
def span_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    slots_ptr,
    start_ptr,
    lens_ptr,
    ends_ptr,
    out_ptr,
    num_tokens,
    num_slots,
    num_blocks,
    table_width,
    q_stride,
    block_stride,
    token_stride,
    head_stride,
    scale,
    window,
    soft_cap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.program_id(2)
    kv_head = tl.program_id(1)
    first = tl.load(start_ptr + row)
    past = tl.minimum(tl.load(start_ptr + row + 1), num_tokens)
    begin = tl.program_id(0) * BLOCK_Q
    count = past - first
    if begin < count:
        slot = tl.load(slots_ptr + row)
        known = (slot >= 0) & (slot < num_slots)
        length = tl.where(known, tl.minimum(tl.load(lens_ptr + row), table_width * BS), 0)
        table = tables_ptr + tl.where(known, slot, 0).to(tl.int64) * table_width
        lane = tl.arange(0, BLOCK_M)
        place = begin + lane // GROUP
        head = kv_head * GROUP + lane % GROUP
        mine = (place < count) & (lane < BLOCK_Q * GROUP)
        token = first + tl.where(mine, place, 0)
        position = length - count + place
        end = tl.maximum(tl.load(ends_ptr + token, mask=mine, other=0), position + 1)
        end = tl.where(mine, tl.minimum(end, length), 0)
        dim = tl.arange(0, BLOCK_D)
        keep = mine[:, None] & (dim < D)[None, :]
        at = token.to(tl.int64)[:, None] * q_stride + head[:, None] * D + dim[None, :]
        q = tl.load(q_ptr + at, mask=keep, other=0.0)
        furthest = tl.max(end, axis=0)
        nearest = 0
        if WINDOW:
            nearest = tl.maximum(length - count + begin - window + 1, 0) // BLOCK_K * BLOCK_K
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for key_begin in range(nearest, furthest, BLOCK_K):
            key = key_begin + tl.arange(0, BLOCK_K)
            there = key < length
            block = tl.load(table + key // BS, mask=there, other=0)
            block = tl.where((block >= 0) & (block < num_blocks), block, 0).to(tl.int64)
            base = block * block_stride + (key % BS).to(tl.int64) * token_stride + kv_head.to(tl.int64) * head_stride
            load = there[:, None] & (dim < D)[None, :]
            k = tl.load(k_ptr + base[:, None] + dim[None, :], mask=load, other=0.0).to(q.dtype)
            v = tl.load(v_ptr + base[:, None] + dim[None, :], mask=load, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
            seen = key[None, :] < end[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - safe[:, None])
            kept = tl.exp(top - safe)
            total = total * kept + tl.sum(weights, axis=1)
            sums = sums * kept[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
            top = higher
        found = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + (token.to(tl.int64)[:, None] * GROUP * tl.num_programs(1) + head[:, None]) * D + dim[None, :],
                 found.to(out_ptr.dtype.element_ty), mask=keep)  # fmt: skip


def span_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    max_query_len: int,
    max_seq_len_bound: int,
) -> torch.Tensor:
    num_tokens, num_heads, size = q.shape
    num_blocks, block_size, num_kv_heads = k_cache.shape[:3]
    assert q.stride(2) == k_cache.stride(3) == 1 and q.stride(1) == size and block_tables.is_contiguous()
    assert k_cache.stride() == v_cache.stride()
    out = torch.zeros((num_tokens, num_heads, size), dtype=q.dtype, device=q.device)
    group, block_d = num_heads // num_kv_heads, max(16, next_power_of_2(size))
    wide = q.dtype == torch.float32 or block_d > 128  # what a program keeps must fit the least shared memory
    lanes = max(16, min(32 if wide else 64, next_power_of_2(max_query_len * group)), next_power_of_2(group))
    block_q = max(lanes // group, 1)
    block_k = 32 if wide else 64
    if num_tokens and row_slots.shape[0]:
        span_kernel[(cdiv(max_query_len, block_q), num_kv_heads, row_slots.shape[0])](
            q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, ends, out,
            num_tokens, block_tables.shape[0], num_blocks, block_tables.shape[1], q.stride(0),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), scale, window, soft_cap,
            GROUP=group, D=size, BS=block_size, BLOCK_D=block_d, BLOCK_Q=block_q, BLOCK_M=lanes, BLOCK_K=block_k,
            WINDOW=window > 0, CAPPED=soft_cap > 0, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out
