"""What ``grammar_mask`` means, in torch: every token of every row at once."""

from __future__ import annotations

import torch

from headway.kernels.automaton import walk


def grammar_mask(
    logits: torch.Tensor,
    slots: torch.Tensor,
    grammar_on: torch.Tensor,
    grammar_info: torch.Tensor,
    grammar_state: torch.Tensor,
    grammar_table: torch.Tensor,
    vocabulary: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
    grammar_serial: torch.Tensor,
    grammar_kept: torch.Tensor,
) -> None:
    """See the package. Nothing is kept: that only saves time."""
    num_slots, vocab = grammar_on.shape[0], logits.shape[1]
    in_table = (slots >= 0) & (slots < num_slots)
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    on = in_table & (grammar_on.index_select(0, slot) != 0)
    info, state = grammar_info.index_select(0, slot), grammar_state.index_select(0, slot)
    base = (slot * grammar_table.shape[1])[:, None]
    after = walk(grammar_table, base, info[:, None], state[:, None], vocabulary[:, None])
    allowed = after != 0  # [N, V]
    ends = (state >= info[:, 2]) & (state > 0) & (state < info[:, 0])
    ids = stop_ids.view(num_slots, -1).index_select(0, slot)  # [N, C']
    listed = torch.arange(ids.shape[1], device=ids.device) < stop_counts.index_select(0, slot)[:, :1]
    listed &= (ids >= 0) & (ids < vocab)
    marks = torch.zeros(allowed.shape, dtype=torch.int32, device=ids.device)
    is_eos = marks.scatter_add(1, torch.where(listed, ids, 0).to(torch.int64), listed.to(torch.int32)) != 0
    allowed = torch.where(is_eos, ends[:, None], allowed)
    logits.masked_fill_(on[:, None] & ~allowed, float("-inf"))
