"""``grammar_advance`` in Triton: ``slot_advance``'s kernel, which also walks."""

from __future__ import annotations

import torch

from headway.kernels.slot_advance.triton import launch


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
    grammars = (grammar_on, grammar_info, grammar_state, grammar_table, vocabulary)
    launch(packed, row_slots, token_ids, tables, grammars, results, (drafts, next_slots, offset))
