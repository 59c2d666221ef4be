"""``decode_attention`` on CUDA: one launch on Hopper, two elsewhere and where heads are not rotated whole."""

from __future__ import annotations

import torch

from headway.kernels.decode_attention.reference import heads_to_write
from headway.kernels.paged_attention.hopper.early_decode import Turn, launch_early_decode, serves
from headway.kernels.paged_attention.launch import paged_attention
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.rope_kv_write.triton import rope_kv_write


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
    size, rotary, group = k_cache.shape[3], cos_sin.shape[1], num_heads // k_cache.shape[2]
    rule = ScoreRule(scale, window, soft_cap, chunk, sinks, slopes)
    if rotary != size or not serves(size, group, qkv.dtype, k_cache.dtype, qkv.device, slopes is not None, width):
        written = heads_to_write(k_cache, v_cache, shares)
        q = rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, *written, num_heads)
        return paged_attention(
            q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, arrivals, scale, window, soft_cap,
            qkv.shape[0] if width == 1 else 0, width, max_seq_len_bound, None, chunk, sinks, slopes, False, width,
        )  # fmt: skip
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and block_tables.is_contiguous(), "rows must be contiguous"
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "cache rows must be contiguous"
    out = torch.empty((qkv.shape[0], num_heads, size), dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        turn = Turn(positions, cos_sin, q_norm, k_norm, eps, kv_slots, shares)
        tables = block_tables, row_slots, seq_lens
        spans = None if width == 1 else (query_start, width)
        launch_early_decode(qkv, k_cache, v_cache, out, arrivals, tables, rule, max_seq_len_bound, turn, spans)
    return out
