"""Attention of each row's tokens to all tokens of the row, both ways: texts packed one behind the other, no padding, no cache.

dense_attention(qkv, query_start, bias, num_heads, num_kv_heads, scale, reach, soft_cap, max_query_len) -> out
    qkv          [T, (H + 2 KH) * D] f32, f16 or bf16, last dimension contiguous: queries, keys, values; H a multiple of KH
    query_start  int32 [R + 1], first token of each row; tokens from query_start[R] on are padding
    bias         f32 [H, 2 L - 1] contiguous, or None: bias[h, j - i + L - 1] is added to the scaled score of query i and
                 key j of a row, for rows of up to L tokens
    reach        a query sees keys at most so many tokens away on either side; -1: all of the row
    soft_cap     scores become cap * tanh(score / cap), ahead of the bias; 0: off
    max_query_len  >= every row's tokens; sizes grids only
    out          [T, H * D] in qkv's dtype; undefined on padding
"""

from __future__ import annotations

import torch

from headway.kernels.dense_attention import reference
from headway.kernels.registry import Op


def _meta(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    *_: object,
) -> torch.Tensor:
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    return torch.empty((qkv.shape[0], num_heads * size), dtype=qkv.dtype, device=qkv.device)


dense_attention = Op(
    "dense_attention(Tensor qkv, Tensor query_start, Tensor? bias, int num_heads, int num_kv_heads, float scale, int reach, "
    "float soft_cap, int max_query_len) -> Tensor",
    reference=reference.dense_attention,
    meta=_meta,
    triton="headway.kernels.dense_attention.triton:dense_attention",
    cpu="headway.kernels.dense_attention.host:dense_attention",
)
