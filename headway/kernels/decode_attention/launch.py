"""Launches the kernel of ``decode_attention``: grid and tile from host numbers only."""

from __future__ import annotations

import torch

from headway.kernels.decode_attention.triton import decode_attention_kernel
from headway.kernels.paged_attention.tiles import choose_splits, decode_tile, num_sms


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
    num_rows = qkv.shape[0]
    num_blocks, block_size, kv_heads, size = k_cache.shape
    assert qkv.stride(1) == 1 and block_tables.is_contiguous() and cos_sin.is_contiguous(), "rows must be contiguous"
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "cache rows must be contiguous"
    assert cos_sin.shape[1] == size and finished.numel() >= num_rows * kv_heads
    out = torch.empty((num_rows, num_heads * size), dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    tile = decode_tile(size, num_heads // kv_heads, qkv.dtype)
    bound = min(max_seq_len_bound, window + tile.block_n) if window > 0 else max_seq_len_bound
    num_splits, min_tiles = choose_splits(num_rows * kv_heads, bound, tile.block_n, num_sms(qkv.device))
    partial = top = out
    if num_splits > 1:
        partial = torch.empty((num_rows, num_heads, num_splits, size), dtype=torch.float32, device=qkv.device)
        top = torch.empty((num_rows, num_heads, num_splits), dtype=torch.float32, device=qkv.device)
    decode_attention_kernel[(kv_heads, num_rows, num_splits)](
        qkv, k_cache, v_cache, out, partial, top, finished,
        cos_sin, cos_sin if q_norm is None else q_norm, cos_sin if k_norm is None else k_norm,
        block_tables, row_slots, seq_lens, kv_slots,
        num_rows, block_tables.shape[0], num_blocks, block_tables.shape[1], cos_sin.shape[0], num_splits, min_tiles,
        eps, scale, window, soft_cap, qkv.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        H=num_heads, KH=kv_heads, D=size, BS=block_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, WINDOWED=window > 0, CAPPED=soft_cap > 0,
        PRECISION=tile.precision, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
