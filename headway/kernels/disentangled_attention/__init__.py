"""Attention both ways within each row, whose scores also compare contents with distances (DeBERTa, He et al. 2021).

disentangled_attention(qkv, query_start, pos_keys, pos_queries, places, num_heads, scale, max_query_len) -> out
    qkv          [T, 3 * H * D] f32, f16 or bf16, last dimension contiguous: queries, keys, values
    query_start  int32 [R + 1], first token of each row; tokens from query_start[R] on are padding
    pos_keys     [B, H * D] in qkv's dtype, contiguous: a key for each kind of distance; or None
    pos_queries  the same for queries
    places       int32 [2 L - 1]: the kind of the distance i - j of query i and key j is places[i - j + L - 1], in [0, B), for
                 rows of up to L tokens
    scale        score(i, j) = scale * (q_i . k_j + q_i . pos_keys[kind] + k_j . pos_queries[kind])
    max_query_len  >= every row's tokens; sizes grids only
    out          [T, H * D] in qkv's dtype; undefined on padding
"""

from __future__ import annotations

import torch

from headway.kernels.disentangled_attention import reference
from headway.kernels.registry import Op


def _meta(qkv: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((qkv.shape[0], qkv.shape[1] // 3), dtype=qkv.dtype, device=qkv.device)


disentangled_attention = Op(
    "disentangled_attention(Tensor qkv, Tensor query_start, Tensor? pos_keys, Tensor? pos_queries, Tensor places, "
    "int num_heads, float scale, int max_query_len) -> Tensor",
    reference=reference.disentangled_attention,
    meta=_meta,
    triton="headway.kernels.disentangled_attention.triton:disentangled_attention",
    cpu="headway.kernels.disentangled_attention.host:disentangled_attention",
)
