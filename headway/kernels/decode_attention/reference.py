"""The meaning of ``decode_attention``: the two separate ops. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.kernels.paged_attention.reference import paged_attention
from headway.kernels.rope_kv_write.reference import rope_kv_write


def decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_slots: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    finished: torch.Tensor,
    num_heads: int,
    eps: float,
    scale: float,
    window: int,
    soft_cap: float,
    max_seq_len_bound: int,
) -> torch.Tensor:
    rows = qkv.shape[0]
    positions = (seq_lens - 1).clamp(min=0)
    q = rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads)
    query_start = torch.arange(rows + 1, dtype=torch.int32, device=qkv.device)
    tables = (block_tables, row_slots, query_start, seq_lens)
    out = paged_attention(q, k_cache, v_cache, *tables, scale, window, soft_cap, rows, 1, max_seq_len_bound)
    return out.flatten(1)
