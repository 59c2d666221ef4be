"""What ``replay_rows`` means, in torch. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.kernels.state_rows import rows_of


def replay_rows(
    storage: torch.Tensor,
    packed: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    stored_at: torch.Tensor,
    store_at: torch.Tensor,
    places: int,
    width: int,
) -> None:
    rows = rows_of(query_start, row_slots, seq_lens, len(storage))
    row = torch.arange(len(row_slots), device=packed.device)
    record = packed[4].long() + 4 * row
    outcomes = packed.take((record + 3).clamp(0, len(packed) - 1))
    continues = (row < packed[2]) & ((outcomes > 1) | (row < packed[6]))
    ends = rows.starts + rows.lens
    stored = storage[rows.slots, 0].long()
    stored = torch.minimum(torch.maximum(stored, ends - places), rows.starts)  # what else it said would be a bug
    store = torch.where(ends + width - stored > places, rows.starts + 1, -1)
    store = torch.where(rows.live, torch.where(continues, store, ends), -1)
    stored_at.copy_(torch.where(rows.live, stored.clamp(min=0), 0))
    store_at.copy_(store)
    mine = (store >= 0) & (rows.slots == torch.arange(len(storage), device=packed.device)[:, None])  # [S, R]
    found = torch.where(mine.any(1), store[mine.int().argmax(1)], storage[:, 0])
    storage[:, 0].copy_(found)
