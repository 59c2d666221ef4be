"""``cross_attention`` on a CPU: the native kernel of ``paged_attention``."""

from __future__ import annotations

import torch

from headway.kernels.cpu.ops import available, paged_attention

__all__ = ["available", "cross_attention"]


def cross_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    max_len_bound: int,
) -> torch.Tensor:
    tables = (block_tables, slots, starts, lens, arrivals)
    return paged_attention(q, k_cache, v_cache, *tables, scale, 0, 0.0, q.shape[0], 1, max_len_bound)
