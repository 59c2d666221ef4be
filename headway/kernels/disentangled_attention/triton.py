"""Triton kernel of ``disentangled_attention``: as ``dense_attention``'s, with two numbers looked up for each pair of tokens.

Products of contents with all kinds of distances are made ahead by matrix multiplication: B of them a token and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_tokens", "middle", "kinds"])
def disentangled_kernel(
    qkv_ptr,  # [T, 3 * H * D]
    start_ptr,  # [R + 1]
    content_ptr,  # [H, T, B], queries with positions' keys
    other_ptr,  # [H, T, B], keys with positions' queries
    places_ptr,  # [2 * middle + 1]
    out_ptr,  # [T, H * D]
    num_tokens,
    row_stride,
    scale,
    middle,
    kinds,  # B
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    row = tl.program_id(2)
    head = tl.program_id(1)
    first = tl.load(start_ptr + row)
    end = tl.minimum(tl.load(start_ptr + row + 1), num_tokens)
    length = end - first
    begin = tl.program_id(0) * BLOCK
    if begin < length:
        place = begin + tl.arange(0, BLOCK)
        dim = tl.arange(0, BLOCK_D)
        keep = (place < length)[:, None] & (dim < D)[None, :]
        at = (first + place).to(tl.int64)[:, None] * row_stride + head * D + dim[None, :]
        q = tl.load(qkv_ptr + at, mask=keep, other=0.0)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        summed = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        table = (head.to(tl.int64) * num_tokens + first) * kinds
        for block in range(0, length, BLOCK):
            other = block + tl.arange(0, BLOCK)
            places = (first + other).to(tl.int64) * row_stride + H * D + head * D
            keep_keys = (other < length)[:, None] & (dim < D)[None, :]
            k = tl.load(qkv_ptr + places[:, None] + dim[None, :], mask=keep_keys, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            seen = (other < length)[None, :] & (place < length)[:, None]
            kind = tl.load(places_ptr + middle + place[:, None] - other[None, :], mask=seen, other=0)
            if KEYS:
                source = content_ptr + table + place.to(tl.int64)[:, None] * kinds + kind
                scores += tl.load(source, mask=seen, other=0.0).to(tl.float32)
            if QUERIES:
                source = other_ptr + table + other.to(tl.int64)[None, :] * kinds + kind
                scores += tl.load(source, mask=seen, other=0.0).to(tl.float32)
            scores = tl.where(seen, scores * scale, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - base[:, None])
            shrunk = tl.exp(highest - base)
            total = total * shrunk + tl.sum(weights, axis=1)
            v = tl.load(qkv_ptr + places[:, None] + H * D + dim[None, :], mask=keep_keys, other=0.0)
            summed = summed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        out = summed / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + (first + place).to(tl.int64)[:, None] * (H * D) + head * D + dim[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=keep)


def disentangled_attention(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    pos_keys: torch.Tensor | None,
    pos_queries: torch.Tensor | None,
    places: torch.Tensor,
    num_heads: int,
    scale: float,
    max_query_len: int,
) -> torch.Tensor:
    assert qkv.stride(1) == 1, "rows must be contiguous"
    num_tokens, num_rows = qkv.shape[0], query_start.shape[0] - 1
    size = qkv.shape[1] // (3 * num_heads)
    out = torch.empty((num_tokens, num_heads * size), dtype=qkv.dtype, device=qkv.device)
    q, k, _ = qkv.unflatten(1, (3, num_heads, size)).unbind(1)
    content = _products(q, pos_keys, num_heads)
    other = _products(k, pos_queries, num_heads)
    block_d = max(16, next_power_of_2(size))
    wide = qkv.dtype == torch.float32 or block_d > 128
    block = min(32 if wide else 64, max(16, next_power_of_2(max_query_len)))
    table = pos_keys if pos_keys is not None else pos_queries
    disentangled_kernel[(cdiv(max(max_query_len, 1), block), num_heads, num_rows)](
        qkv, query_start, qkv if content is None else content, qkv if other is None else other, places, out,
        num_tokens, qkv.stride(0), scale, places.shape[0] // 2, 0 if table is None else table.shape[0],
        H=num_heads, D=size, BLOCK_D=block_d, BLOCK=block, KEYS=content is not None, QUERIES=other is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _products(x: torch.Tensor, table: torch.Tensor | None, num_heads: int) -> torch.Tensor | None:
    """[H, T, B] of x [T, H, D] with a table [B, H * D]."""
    if table is None:
        return None
    return torch.matmul(x.transpose(0, 1), table.unflatten(1, (num_heads, -1)).permute(1, 2, 0)).contiguous()
