"""The meaning of ``segment_pool``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch


def segment_pool(
    hidden: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, skip: torch.Tensor, kind: int
) -> torch.Tensor:
    token = torch.arange(hidden.shape[0], device=hidden.device)
    start, end = query_start[:-1, None], query_start[1:, None]
    position = token - end + seq_lens[:, None]  # [R, T]
    counts = (token >= start) & (token < end) & (position >= skip[:, None]) & (seq_lens > 0)[:, None]
    wide = torch.where(counts[..., None], hidden.float(), float("-inf") if kind == 1 else 0.0)  # [R, T, C]
    if kind == 1:
        return wide.amax(1)
    return (wide * (position + 1)[..., None]).sum(1) if kind == 2 else wide.sum(1)
