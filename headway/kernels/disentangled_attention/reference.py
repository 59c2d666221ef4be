"""The meaning of ``disentangled_attention``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch


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
    num_tokens, middle = qkv.shape[0], places.shape[0] // 2
    q, k, v = qkv.float().unflatten(1, (3, num_heads, -1)).permute(1, 2, 0, 3)  # [H, T, D] each
    token = torch.arange(num_tokens, device=qkv.device, dtype=torch.int32)
    row = torch.searchsorted(query_start[1:].contiguous(), token, right=True)
    apart = (token[:, None] - token[None, :] + middle).clamp(0, places.shape[0] - 1)
    scores = q @ k.mT + by_distance(q, k, pos_keys, pos_queries, places[apart].long())
    scores = (scores * scale).masked_fill(row[:, None] != row[None, :], float("-inf"))
    v = torch.where((row < query_start.shape[0] - 1)[:, None], v, 0.0)  # what padding holds may be anything
    return (torch.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1).to(qkv.dtype)


def by_distance(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_keys: torch.Tensor | None,
    pos_queries: torch.Tensor | None,
    kind: torch.Tensor,
) -> torch.Tensor:
    """What distances add to the products of q and k [..., H, L, D]: [..., H, L, L]; ``kind`` int64 [L, L]."""
    heads, length = q.shape[-3], q.shape[-2]
    found = q.new_zeros((*q.shape[:-1], length))
    index = kind.expand(found.shape)
    if pos_keys is not None:
        table = pos_keys.to(q.dtype).unflatten(1, (heads, -1)).permute(1, 2, 0)  # [H, D, B]
        found = found + (q @ table).gather(-1, index)
    if pos_queries is not None:
        table = pos_queries.to(q.dtype).unflatten(1, (heads, -1)).permute(1, 2, 0)
        found = found + (k @ table).gather(-1, index.mT).mT
    return found
