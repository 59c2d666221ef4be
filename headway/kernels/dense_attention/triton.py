"""Triton kernel of ``dense_attention``: a program takes a block of one row's queries for one head, and goes over its keys once.

Softmax runs over blocks of keys with a running maximum and sum (Dao et al. 2022). ``hopper`` has a kernel for heads of 64 in
16 bits that see whole rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.hopper import runs_gluon

LOG2E = tl.constexpr(1.4426950408889634)
SHORT = 64
"""Tokens of the longest row up to which this kernel serves on Hopper, too: in tiles of no more than that row."""


@triton.jit
def _over_keys(
    highest,
    total,
    summed,
    q,
    keys_ptr,  # of the row's first token and the head
    bias_ptr,  # of the head, at the distance 0
    place,
    low,
    high,
    length,
    row_stride,
    values_at,
    scale,
    reach,
    soft_cap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    NEAR: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Softmax so far, with the keys [low, high) taken in; without ``MASKED`` every query sees all of them."""
    dim = tl.arange(0, BLOCK_D)
    for block in range(low, high, BLOCK_K):
        other = block + tl.arange(0, BLOCK_K)
        inside = other < length
        at = keys_ptr + other.to(tl.int64)[:, None] * row_stride + dim[None, :]
        if MASKED or D != BLOCK_D:
            kept = inside[:, None] & (dim < D)[None, :]
            k = tl.load(at, mask=kept, other=0.0)
            v = tl.load(at + values_at, mask=kept, other=0.0)
        else:
            k = tl.load(at)
            v = tl.load(at + values_at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = 1.0
        apart = other[None, :] - place[:, None]
        if CAPPED:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores * scale / soft_cap) + 1.0)) * LOG2E
        elif BIAS:
            scores *= scale * LOG2E
        else:  # scaled as the maximum is subtracted, in one instruction
            factor = scale * LOG2E
        if BIAS:
            seen = inside[None, :] & (place < length)[:, None]
            scores += tl.load(bias_ptr + apart, mask=seen, other=0.0) * LOG2E
        if MASKED:
            seen = inside[None, :]
            if NEAR:
                seen = seen & (apart <= reach) & (apart >= -reach)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        base = higher
        if MASKED:  # Nothing seen so far: exp2(-inf - -inf) would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - base[:, None])
        shrunk = tl.exp2(highest - base)
        total = total * shrunk + tl.sum(weights, axis=1)
        summed = tl.dot(weights.to(v.dtype), v, summed * shrunk[:, None], input_precision="ieee")
        highest = higher
    return highest, total, summed


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
        own = qkv_ptr + first.to(tl.int64) * row_stride
        q = tl.load(own + place.to(tl.int64)[:, None] * row_stride + head * D + dim[None, :], mask=keep, other=0.0)
        highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        summed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        keys = own + H * D + head // (H // KH) * D
        bias = bias_ptr + head.to(tl.int64) * (2 * middle + 1) + middle
        if NEAR:
            low = tl.maximum(begin - reach, 0) // BLOCK_K * BLOCK_K
            high = tl.minimum(length, begin + BLOCK_Q + reach)
        else:  # whole blocks first, which need no mask
            low = length // BLOCK_K * BLOCK_K
            high = length
            highest, total, summed = _over_keys(
                highest, total, summed, q, keys, bias, place, 0, low, length, row_stride, KH * D, scale, reach, soft_cap,
                D, BLOCK_D, BLOCK_K, BIAS, NEAR, CAPPED, False,
            )  # fmt: skip
        highest, total, summed = _over_keys(
            highest, total, summed, q, keys, bias, place, low, high, length, row_stride, KH * D, scale, reach, soft_cap,
            D, BLOCK_D, BLOCK_K, BIAS, NEAR, CAPPED, True,
        )  # fmt: skip
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
    assert scale > 0, "the highest product must have the highest score"
    num_tokens, num_rows = qkv.shape[0], query_start.shape[0] - 1
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    out = torch.empty((num_tokens, num_heads * size), dtype=qkv.dtype, device=qkv.device)
    if bias is None and reach < 0 and soft_cap == 0 and max_query_len > SHORT and overlaps(qkv, size):
        from headway.kernels.dense_attention.hopper.launch import launch_overlapped

        launch_overlapped(qkv, query_start, out, num_heads, num_kv_heads, scale, max_query_len)
        return out
    block_d = max(16, next_power_of_2(size))
    most_q, most_k, warps, stages = tile(qkv.dtype, block_d)
    longest = max(16, next_power_of_2(max_query_len))
    block_q, block_k = min(most_q, longest), min(most_k, longest)
    dense_kernel[(cdiv(max(max_query_len, 1), block_q), num_heads, num_rows)](
        qkv, query_start, qkv if bias is None else bias, out, num_tokens, qkv.stride(0), scale, reach, soft_cap,
        0 if bias is None else bias.shape[1] // 2,
        H=num_heads, KH=num_kv_heads, D=size, BLOCK_D=block_d, BLOCK_Q=block_q, BLOCK_K=block_k,
        BIAS=bias is not None, NEAR=reach >= 0, CAPPED=soft_cap > 0,
        num_warps=4 if block_q < most_q else warps, num_stages=stages,
    )  # fmt: skip
    return out


def overlaps(qkv: torch.Tensor, size: int) -> bool:
    """Whether ``hopper``'s kernel can serve: for heads of 64 in 16 bits it won (``bench/ops/dense_attention.py``)."""
    fits = size == 64 and qkv.dtype in (torch.bfloat16, torch.float16) and runs_gluon(qkv.device)
    return fits and qkv.shape[0] > 0 and qkv.stride(0) % 8 == 0 and qkv.data_ptr() % 16 == 0


def tile(dtype: torch.dtype, size: int) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a program for long rows; what it keeps fits the least shared memory of the cards."""
    if dtype == torch.float32 or size > 128:
        return 32, 32, 4, 2
    return (64, 64, 4, 3) if size <= 64 else (64, 64, 4, 2)
