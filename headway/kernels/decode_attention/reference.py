"""The meaning of ``decode_attention``: its two halves, one after the other."""

from __future__ import annotations

import torch

from headway.kernels.paged_attention.reference import paged_attention
from headway.kernels.rope_kv_write.reference import rope_kv_write


def decode_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    max_seq_len_bound: int,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    width: int = 1,
) -> torch.Tensor:
    q = rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads)
    return paged_attention(
        q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, arrivals, scale, window, soft_cap,
        qkv.shape[0] if width == 1 else 0, width, max_seq_len_bound, None, chunk, sinks, slopes, False, width,
    )  # fmt: skip
