"""What ``step_unpack`` means, in torch."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import gather_rows


def step_unpack(
    packed: torch.Tensor,
    history: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    block_tables: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    row_slots: torch.Tensor,
    logit_indices: torch.Tensor,
    block_size: int,
    max_query_len: int,
    num_tokens: torch.Tensor | None = None,
    drafts: torch.Tensor | None = None,
) -> None:
    """See the package. ``max_query_len`` sizes grids only and is not needed here."""
    num_slots, length = history.shape
    num_rows, room = seq_lens.shape[0], input_ids.shape[0]
    total = packed[3].clamp(0, room)
    row = torch.arange(num_rows, device=packed.device)
    at = packed[4].to(torch.int64) + 4 * row
    real = (row < packed[2]) & (at >= 0) & (at + 3 < packed.shape[0])  # [R]
    record = packed.take((at[:, None] + torch.arange(4, device=packed.device)).clamp(0, packed.shape[0] - 1))
    slot, query_len, first, outcomes = record.unbind(1)
    known = real & (slot >= 0) & (slot < num_slots)
    safe_slot = torch.where(known, slot, 0).to(torch.int64)
    start = num_computed.index_select(0, safe_slot)
    live = known & (alive.index_select(0, safe_slot) != 0) & (query_len > 0)
    live &= (start >= 0) & (start <= length - query_len)
    first = torch.where(real, first, total)
    query_start[:num_rows].copy_(first)
    query_start[num_rows].copy_(total)
    row_slots.copy_(torch.where(known, slot, -1))
    seq_lens.copy_(torch.where(live, start + query_len, 0))
    last = (first + query_len - 1).clamp(0, room - 1)
    nth = torch.arange(logit_indices.shape[0] // num_rows, device=packed.device, dtype=torch.int32)[:, None]  # [W, 1]
    runs = (outcomes > 1) & (drafts is not None)
    source = torch.where(runs, torch.minimum((first + nth).clamp(min=0), last), last)  # [W, R]
    logit_indices.copy_(torch.where(real, source, 0).view(-1))

    token = torch.arange(room, device=packed.device, dtype=torch.int32)
    owner = (torch.searchsorted(first.contiguous(), token, right=True) - 1).clamp(min=0)  # [T] row of each token
    offset = token - first.index_select(0, owner)
    inside = live.index_select(0, owner) & (token < total) & (offset >= 0) & (offset < query_len.index_select(0, owner))
    position = torch.where(inside, start.index_select(0, owner) + offset, 0)
    owner_slot = safe_slot.index_select(0, owner)
    column = position // block_size
    token_id = gather_rows(history, owner_slot, position)
    if drafts is not None and num_tokens is not None:
        ahead = position - num_tokens.index_select(0, owner_slot)  # how far beyond the known tokens
        guess = torch.where(ahead < drafts.shape[1], gather_rows(drafts, owner_slot, ahead), 0)
        token_id = torch.where(ahead >= 0, guess, token_id)
    input_ids.copy_(torch.where(inside, token_id, 0))
    positions.copy_(position)
    slots_of_groups = kv_slots.view(-1, room) if kv_slots.dim() == 1 else kv_slots
    for tables, written in zip(block_tables.view(len(slots_of_groups), num_slots, -1), slots_of_groups, strict=True):
        block = gather_rows(tables, owner_slot, column)
        in_cache = inside & (block > 0) & (column < tables.shape[1])
        written.copy_(torch.where(in_cache, block * block_size + position % block_size, -1))
