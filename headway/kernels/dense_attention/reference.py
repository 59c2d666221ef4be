"""The meaning of ``dense_attention``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch


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
    num_tokens, group = qkv.shape[0], num_heads // num_kv_heads
    heads = qkv.float().unflatten(1, (num_heads + 2 * num_kv_heads, -1)).transpose(0, 1)  # [H + 2 KH, T, D]
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads])
    token = torch.arange(num_tokens, device=qkv.device, dtype=torch.int32)
    row = torch.searchsorted(query_start[1:].contiguous(), token, right=True)  # R on padding
    apart = token[None, :] - token[:, None]  # [T, T], key - query
    seen = row[:, None] == row[None, :]
    if reach >= 0:
        seen = seen & (apart.abs() <= reach)
    scores = q @ k.repeat_interleave(group, dim=0).transpose(1, 2) * scale  # [H, T, T]
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        middle = bias.shape[1] // 2
        scores = scores + bias[:, (apart + middle).clamp(0, bias.shape[1] - 1)]
    scores = scores.masked_fill(~seen, float("-inf"))
    # What padding holds may be anything, and 0 * NaN is NaN.
    v = torch.where((row < query_start.shape[0] - 1)[:, None], v, 0.0)
    out = torch.softmax(scores, dim=-1) @ v.repeat_interleave(group, dim=0)
    return out.transpose(0, 1).flatten(1).to(qkv.dtype)
