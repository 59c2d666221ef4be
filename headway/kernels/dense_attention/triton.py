"""Triton kernel of ``dense_attention``: a program takes a block of one row's queries for one head, and goes over its keys once.

Softmax runs over blocks of keys with a running maximum and sum (Dao et al. 2022).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_tokens", "reach", "middle"])
def dense_kernel(
    qkv_ptr,  # [T, (H + 2 KH) * D]
    start_ptr,  # [R + 1]
    bias_ptr,  # [H, 2 * middle + 1]
    out_ptr,  # [T, H * D]
    num_tokens,
    row_stride,
    scale,
    reach,
    soft_cap,
    middle,
    H: tl.constexpr,
    KH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    NEAR: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row = tl.program_id(2)
    head = tl.program_id(1)
    first = tl.load(start_ptr + row)
    end = tl.minimum(tl.load(start_ptr + row + 1), num_tokens)
    length = end - first
    begin = tl.program_id(0) * BLOCK_Q
    if begin < length:
        place = begin + tl.arange(0, BLOCK_Q)
        dim = tl.arange(0, BLOCK_D)
        keep = (place < length)[:, None] & (dim < D)[None, :]
        at = (first + place).to(tl.int64)[:, None] * row_stride + head * D + dim[None, :]
        q = tl.load(qkv_ptr + at, mask=keep, other=0.0)
        highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        summed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        low = 0
        high = length
        if NEAR:
            low = tl.maximum(begin - reach, 0) // BLOCK_K * BLOCK_K
            high = tl.minimum(length, begin + BLOCK_Q + reach)
        column = H * D + head // (H // KH) * D
        for block in range(low, high, BLOCK_K):
            other = block + tl.arange(0, BLOCK_K)
            inside = other < length
            places = (first + other).to(tl.int64) * row_stride + column
            keep_keys = inside[:, None] & (dim < D)[None, :]
            k = tl.load(qkv_ptr + places[:, None] + dim[None, :], mask=keep_keys, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
            apart = other[None, :] - place[:, None]
            seen = inside[None, :] & (place < length)[:, None]
            if BIAS:
                bias_at = bias_ptr + head.to(tl.int64) * (2 * middle + 1) + middle + apart
                scores += tl.load(bias_at, mask=seen, other=0.0)
            if NEAR:
                seen = seen & (apart <= reach) & (apart >= -reach)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            # Nothing seen so far: exp(-inf - -inf) would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - base[:, None])
            shrunk = tl.exp(highest - base)
            total = total * shrunk + tl.sum(weights, axis=1)
            v = tl.load(qkv_ptr + places[:, None] + KH * D + dim[None, :], mask=keep_keys, other=0.0)
            summed = summed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        out = summed / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + (first + place).to(tl.int64)[:, None] * (H * D) + head * D + dim[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=keep)


def dense_attention(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    reach: int,
    soft_cap: float,
    max_query_len: int,
) -> torch.Tensor:
    assert qkv.stride(1) == 1 and (bias is None or bias.is_contiguous()), "rows must be contiguous"
    num_tokens, num_rows = qkv.shape[0], query_start.shape[0] - 1
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    out = torch.empty((num_tokens, num_heads * size), dtype=qkv.dtype, device=qkv.device)
    block_d = max(16, next_power_of_2(size))
    wide = qkv.dtype == torch.float32 or block_d > 128  # what a program keeps must fit the least shared memory
    block = min(32 if wide else 64, max(16, next_power_of_2(max_query_len)))
    dense_kernel[(cdiv(max(max_query_len, 1), block), num_heads, num_rows)](
        qkv, query_start, qkv if bias is None else bias, out, num_tokens, qkv.stride(0), scale, reach, soft_cap,
        0 if bias is None else bias.shape[1] // 2,
        H=num_heads, KH=num_kv_heads, D=size, BLOCK_D=block_d, BLOCK_Q=block, BLOCK_K=block,
        BIAS=bias is not None, NEAR=reach >= 0, CAPPED=soft_cap > 0,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
