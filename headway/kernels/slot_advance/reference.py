"""What ``slot_advance`` means, in torch."""

from __future__ import annotations

import torch

from headway.core.plan import Finish
from headway.kernels.masked_write import gather_rows, masked_write_

MAX_COUNT = 32767


def slot_advance(
    packed: torch.Tensor,
    row_slots: torch.Tensor,
    token_ids: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    min_total: torch.Tensor,
    max_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
    results: torch.Tensor,
    drafts: torch.Tensor | None = None,
    next_slots: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    num_slots, length = history.shape
    vocab = counts.shape[1]
    row = torch.arange(row_slots.shape[0], device=packed.device)
    at = packed[4].to(torch.int64) + 4 * row
    real = (row < packed[2]) & (at >= 0) & (at + 3 < packed.shape[0]) & (row_slots >= 0) & (row_slots < num_slots)
    slot = torch.where(real, row_slots, 0).to(torch.int64)
    live = real & (alive.index_select(0, slot) != 0)
    query_len = packed.take((at + 1).clamp(0, packed.shape[0] - 1))
    outcomes = packed.take((at + 3).clamp(0, packed.shape[0] - 1))
    sampled = live & (outcomes > offset)
    if drafts is not None:
        query_len = torch.where(outcomes > 1, 1, query_len)
    before = num_tokens.index_select(0, slot)
    after = before + sampled.to(torch.int32)

    finish = _finish(token_ids, before, slot, min_total, max_total.clamp(max=length), stop_counts, stop_ids)
    finish = torch.where(token_ids < 0, int(Finish.NO_TOKEN), finish)
    finish = torch.where(sampled, finish, 0)
    written = token_ids.clamp(min=0)
    masked_write_(history, slot * length + before, written, sampled & (before >= 0) & (before < length))
    masked_write_(num_computed, slot, num_computed.index_select(0, slot) + query_len, live)
    masked_write_(num_tokens, slot, after, sampled)
    masked_write_(alive, slot, torch.zeros_like(slot), finish != 0)
    counted = sampled & (count_on.index_select(0, slot) != 0) & (token_ids >= 0) & (token_ids < vocab)
    count = gather_rows(counts, slot, token_ids)
    counted &= (count.to(torch.int32) & MAX_COUNT) != MAX_COUNT
    masked_write_(counts, slot * vocab + token_ids, count + 1, counted)

    ring = packed[5].to(torch.int64)
    result = torch.stack((sampled.to(torch.int32) * (offset + 1), torch.where(sampled, written, 0), finish, after), 1)
    result = torch.where(live[:, None], result, 0)  # [R, 4]
    inside = ((ring >= 0) & (ring < results.shape[0])).expand(result.shape)
    place = ring * results[0].numel() + results.shape[2] * row[:, None] + torch.arange(4, device=packed.device)
    if offset:
        inside = inside & live[:, None]
        place = place + torch.where(torch.arange(4, device=packed.device) == 1, 2 + offset, 0)  # of the token
    masked_write_(results, place, result, inside)
    if drafts is not None and next_slots is not None:
        draft = gather_rows(drafts.view(num_slots, -1), slot, torch.full_like(slot, offset))
        goes_on = sampled & (finish == int(Finish.NONE)) & (outcomes > offset + 1) & (draft == token_ids)
        next_slots.copy_(torch.where(goes_on, row_slots, -1))


def _finish(
    token_ids: torch.Tensor,
    before: torch.Tensor,
    slot: torch.Tensor,
    min_total: torch.Tensor,
    max_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
) -> torch.Tensor:
    """Finish code [R] of a row that samples."""
    ids = stop_ids.view(stop_counts.shape[0], -1).index_select(0, slot)  # [R, C]
    bounds = stop_counts.index_select(0, slot)  # [R, 2]
    column = torch.arange(ids.shape[1], device=ids.device)
    hit = (ids == token_ids[:, None]) & (column < bounds[:, 1:2]) & (before >= min_total.index_select(0, slot))[:, None]
    is_eos = (hit & (column < bounds[:, 0:1])).any(1)
    code = torch.where(before + 1 >= max_total.index_select(0, slot), int(Finish.LENGTH), int(Finish.NONE))
    code = torch.where(hit.any(1), int(Finish.STOP_TOKEN), code)
    return torch.where(is_eos, int(Finish.EOS), code).to(torch.int32)
