"""What ``cross_rows`` means, in torch."""

from __future__ import annotations

import torch


def cross_rows(
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    num_rows, num_slots = row_slots.shape[0], encoder_lens.shape[0]
    token = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
    row = torch.searchsorted(query_start[1:].contiguous(), token, right=True)
    inside = row < num_rows
    row = row.clamp(max=num_rows - 1)
    slot = row_slots.index_select(0, row)
    reads = inside & (seq_lens.index_select(0, row) > 0) & (slot >= 0) & (slot < num_slots)
    slots.copy_(torch.where(reads, slot, -1))
    lens.copy_(torch.where(reads, encoder_lens.index_select(0, slot.clamp(0, num_slots - 1)), 0))
