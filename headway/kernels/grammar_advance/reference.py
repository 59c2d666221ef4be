"""What ``grammar_advance`` means, in torch."""

from __future__ import annotations

import torch

from headway.core.plan import Finish
from headway.kernels.automaton import walk
from headway.kernels.masked_write import masked_write_
from headway.kernels.slot_advance.reference import slot_advance


def grammar_advance(
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
    grammar_on: torch.Tensor,
    grammar_info: torch.Tensor,
    grammar_state: torch.Tensor,
    grammar_table: torch.Tensor,
    vocabulary: torch.Tensor,
    results: torch.Tensor,
    drafts: torch.Tensor | None = None,
    next_slots: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    tables = (history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total, stop_counts, stop_ids)
    slot_advance(packed, row_slots, token_ids, *tables, results, drafts, next_slots, offset)
    num_slots, vocab = grammar_on.shape[0], vocabulary.shape[1]
    in_table = (row_slots >= 0) & (row_slots < num_slots)
    slot = torch.where(in_table, row_slots, 0).to(torch.int64)
    ring = packed[5].to(torch.int64)
    in_ring = (ring >= 0) & (ring < results.shape[0])
    row = torch.arange(row_slots.shape[0], device=packed.device)
    place = torch.where(in_ring, ring, 0) * results[0].numel() + results.shape[2] * row  # [R], of results[ring, r, 0]
    sampled, finish = results.view(-1).take(place) == offset + 1, results.view(-1).take(place + 2)
    mine = in_table & in_ring & sampled & (grammar_on.index_select(0, slot) != 0)

    info, state = grammar_info.index_select(0, slot), grammar_state.index_select(0, slot)
    real = (token_ids >= 0) & (token_ids < vocab)
    tokens = vocabulary.index_select(1, torch.where(real, token_ids, 0))  # [C + 1, R]
    after = walk(grammar_table, slot * grammar_table.shape[1], info, state, tokens)
    after = torch.where(real, after, 0)
    goes_on = mine & ((finish == Finish.NONE) | (finish == Finish.LENGTH))
    accepts = (state >= info[:, 2]) & (state > 0) & (state < info[:, 0])
    broken = (goes_on & (after == 0)) | (mine & (finish == Finish.EOS) & ~accepts)
    masked_write_(grammar_state, slot, after, goes_on)
    masked_write_(alive, slot, torch.zeros_like(slot), broken)
    masked_write_(results, place + 2, torch.full_like(place, int(Finish.NO_TOKEN)), broken)
    if next_slots is not None:
        next_slots.copy_(torch.where(broken, -1, next_slots))
