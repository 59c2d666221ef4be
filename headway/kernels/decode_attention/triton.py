"""``decode_attention`` on CUDA: one launch, or two where heads are not rotated whole."""

from __future__ import annotations

import torch

from headway.core.ints import next_power_of_2
from headway.kernels.paged_attention.launch import Turn, launch_decode, paged_attention
from headway.kernels.rope_kv_write.triton import rope_kv_write

SIZES = range(16, 257)
"""Head sizes of the single launch, powers of two."""


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
) -> torch.Tensor:
    size = k_cache.shape[3]
    if size != cos_sin.shape[1] or size not in SIZES or size != next_power_of_2(size):
        q = rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads)
        return paged_attention(
            q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, arrivals, scale, window, soft_cap,
            qkv.shape[0], 1, max_seq_len_bound,
        )  # fmt: skip
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and block_tables.is_contiguous(), "rows must be contiguous"
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "cache rows must be contiguous"
    out = torch.empty((qkv.shape[0], num_heads, size), dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        launch_decode(
            qkv, k_cache, v_cache, out, arrivals, (block_tables, row_slots, seq_lens), (scale, window, soft_cap),
            qkv.shape[0], max_seq_len_bound, turn=Turn(positions, cos_sin, q_norm, k_norm, eps, kv_slots),
        )  # fmt: skip
    return out
