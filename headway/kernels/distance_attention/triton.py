"""``distance_attention`` in Triton: a program per token and head goes over its keys once, with a running maximum and sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import next_power_of_2

BLOCK_N = 64


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_blocks", "table_width", "num_distances"])
def distance_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, tables, row_slots, query_start, seq_lens, bias,
    num_rows, num_slots, num_blocks, table_width, num_distances, scale,
    q_stride, block_stride, token_stride, head_stride,
    H: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HALVINGS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    low = 0 * num_rows  # rows that end at the token or before it
    high = num_rows
    for _ in tl.static_range(HALVINGS):
        going = low < high
        middle = (low + high) // 2
        behind = going & (tl.load(query_start + middle + 1, mask=going, other=0) <= token)
        high = tl.where(going & (behind == 0), middle, high)
        low = tl.where(behind, middle + 1, low)
    inside = low < num_rows
    slot = tl.load(row_slots + low, mask=inside, other=-1).to(tl.int64)
    known = inside & (slot >= 0) & (slot < num_slots)
    length = tl.minimum(tl.load(seq_lens + low, mask=known, other=0), table_width * BS)
    place = length - (tl.load(query_start + low + 1, mask=known, other=0) - token)
    dim = tl.arange(0, BLOCK_D)
    keep = dim < D
    q = tl.load(q_ptr + token.to(tl.int64) * q_stride + head * D + dim, mask=keep, other=0.0).to(tl.float32)
    highest = -float("inf")
    total = 0.0
    summed = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, tl.minimum(place + 1, length), BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = (key <= place) & (key < length)
        block = tl.load(tables + slot * table_width + key // BS, mask=seen, other=0)
        block = tl.where((block >= 0) & (block < num_blocks), block, 0).to(tl.int64)
        at = (block * block_stride + (key % BS) * token_stride + head * head_stride)[:, None] + dim[None, :]
        both = seen[:, None] & keep[None, :]
        k = tl.load(k_ptr + at, mask=both, other=0.0).to(tl.float32)
        distance = tl.minimum(place - key, num_distances - 1)
        scores = tl.sum(k * q[None, :], axis=1) * scale
        scores += tl.load(bias + head * num_distances + distance, mask=seen, other=0.0)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=0))
        shrunk = tl.exp(highest - higher)
        weights = tl.exp(scores - higher)
        v = tl.load(v_ptr + at, mask=both, other=0.0).to(tl.float32)
        total = total * shrunk + tl.sum(weights, axis=0)
        summed = summed * shrunk + tl.sum(weights[:, None] * v, axis=0)
        highest = higher
    out = summed / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (token.to(tl.int64) * H + head) * D + dim, out.to(out_ptr.dtype.element_ty), mask=keep)


def distance_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    max_seq_len_bound: int,
) -> torch.Tensor:
    num_tokens, heads, size = q.shape
    assert q.stride()[1:] == (size, 1) and block_tables.is_contiguous() and bias.is_contiguous()
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "cache rows must be contiguous"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_blocks, block_size = k_cache.shape[:2]
    num_rows = row_slots.shape[0]
    if num_tokens:
        distance_kernel[(num_tokens, heads)](
            q, k_cache, v_cache, out, block_tables, row_slots, query_start, seq_lens, bias,
            num_rows, block_tables.shape[0], num_blocks, block_tables.shape[1], bias.shape[1], scale,
            q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            H=heads, D=size, BS=block_size, BLOCK_N=BLOCK_N, BLOCK_D=max(16, next_power_of_2(size)),
            HALVINGS=num_rows.bit_length(), num_warps=4,
        )  # fmt: skip
    return out
