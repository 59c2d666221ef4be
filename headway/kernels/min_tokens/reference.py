"""What ``min_tokens`` means, in torch."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import forbid_


def min_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    min_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
) -> None:
    num_slots, vocab = num_tokens.shape[0], logits.shape[1]
    in_table = (slots >= 0) & (slots < num_slots)
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    row_on = in_table & (num_tokens.index_select(0, slot) < min_total.index_select(0, slot))
    ids = stop_ids.view(num_slots, -1).index_select(0, slot)  # [N, C]
    column = torch.arange(ids.shape[1], device=ids.device)
    on = row_on[:, None] & (column < stop_counts.index_select(0, slot)[:, 1:2]) & (ids >= 0) & (ids < vocab)
    forbid_(logits, ids, on)
