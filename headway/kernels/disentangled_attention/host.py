"""``disentangled_attention`` on a CPU: once for each run of rows of equal length."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.dense_attention.host import runs
from headway.kernels.disentangled_attention.reference import by_distance


def available() -> bool:
    """It needs nothing but torch."""
    return True


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
    out = torch.empty((qkv.shape[0], qkv.shape[1] // 3), dtype=qkv.dtype)
    for start, rows, length in runs(query_start.tolist()):  # host: a CPU operation
        end = start + rows * length
        q, k, v = qkv[start:end].view(rows, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)  # [rows, H, length, D]
        place = torch.arange(length)
        kind = places[place[:, None] - place[None, :] + places.shape[0] // 2].long()
        added = by_distance(q, k, pos_keys, pos_queries, kind) * scale
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=added.to(q.dtype), scale=scale)
        out[start:end].view(rows, length, num_heads, -1).copy_(found.transpose(1, 2))
    return out
