"""The meaning of ``media_places``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.core.media import RUN_WORDS, RUNS_AT


def media_places(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    sees: bool,
) -> torch.Tensor:
    num_slots, width = table.shape
    num_rows = row_slots.shape[0]
    token = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    row = torch.searchsorted(query_start[1:].contiguous(), token, right=True)
    slot = row_slots[row.clamp(max=num_rows - 1)]
    real = (row < num_rows) & (slot >= 0) & (slot < num_slots)
    own = table[slot.clamp(0, num_slots - 1).long()]  # [T, W]
    count, prompt = own[:, 0].clamp(0, (width - RUNS_AT) // RUN_WORDS), own[:, 1]
    starts = own[:, RUNS_AT::RUN_WORDS]  # [T, K]
    begun = (torch.arange(starts.shape[1], device=token.device) < count[:, None]) & (starts <= positions[:, None])
    last = begun.sum(1) - 1  # the last run that has begun
    own_run = last.clamp(min=0)[:, None]
    run = own[:, RUNS_AT:].unflatten(1, (-1, RUN_WORDS)).gather(1, own_run[:, :, None].expand(-1, 1, RUN_WORDS))[:, 0]
    start, end, base, columns, behind, late = run.unbind(1)
    feature = rows[slot.clamp(0, num_slots - 1).long()].gather(1, own_run)[:, 0]
    any_run = last >= 0
    inside = any_run & (positions < end)
    place = positions - start
    seen = torch.where(positions < prompt, prompt, positions + 1)
    if sees:
        seen = torch.where(inside & (columns > 0), torch.maximum(seen, end), seen)
    columns = columns.clamp(min=1)
    plain = positions + torch.where(any_run, behind, 0)
    time = torch.where(inside, base + late, plain)
    down = torch.where(inside, base + place // columns, plain)
    right = torch.where(inside, base + place % columns, plain)
    found = torch.stack([torch.where(inside, feature + place, -1), seen, time, down, right])
    nothing = torch.zeros_like(found)
    nothing[0] = -1
    return torch.where(real, found, nothing).int()
