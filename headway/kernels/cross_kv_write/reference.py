"""What ``cross_kv_write`` means, in torch."""

from __future__ import annotations

import torch


def cross_kv_write(kv: torch.Tensor, places: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """See the package. What belongs nowhere is written to block 0, which holds nothing, as what is there already."""
    num_blocks, block_size, kv_heads, size = k_cache.shape
    real = (places >= 0) & (places < num_blocks * block_size)
    place = torch.where(real, places, 0).long()
    block, offset = place // block_size, place % block_size
    for cache, part in zip((k_cache, v_cache), kv.unflatten(1, (2, kv_heads, size)).unbind(1), strict=True):
        kept = torch.where(real[:, None, None], part.float(), cache[block, offset].float())
        cache[block, offset] = kept.to(cache.dtype)
