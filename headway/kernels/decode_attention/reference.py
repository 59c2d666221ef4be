"""The meaning of ``decode_attention``: its two halves, one after the other."""

from __future__ import annotations

import torch

from headway.kernels.paged_attention.reference import paged_attention
from headway.kernels.rope_kv_write.reference import rope_kv_write


def heads_to_write(k_cache: torch.Tensor, v_cache: torch.Tensor, shares: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches [NB, bs, KH, D] as ``rope_kv_write`` takes them: with ``shares`` none of their heads."""
    return (k_cache[:, :, :0], v_cache[:, :, :0]) if shares else (k_cache, v_cache)


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
    shares: bool = False,
) -> torch.Tensor:
    written = heads_to_write(k_cache, v_cache, shares)
    q = rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, *written, num_heads)
    return paged_attention(
        q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, arrivals, scale, window, soft_cap,
        qkv.shape[0] if width == 1 else 0, width, max_seq_len_bound, None, chunk, sinks, slopes, False, width,
    )  # fmt: skip
