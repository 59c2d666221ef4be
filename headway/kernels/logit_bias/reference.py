"""What ``logit_bias`` means, in torch."""

from __future__ import annotations

import torch


def logit_bias(
    logits: torch.Tensor,
    slots: torch.Tensor,
    bias_counts: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    num_slots, vocab = bias_counts.shape[0], logits.shape[1]
    row_on = (slots >= 0) & (slots < num_slots)
    slot = torch.where(row_on, slots, 0).to(torch.int64)
    ids = bias_ids.view(num_slots, -1).index_select(0, slot)  # [N, B]
    values = bias_values.view(num_slots, -1).index_select(0, slot)
    entry = torch.arange(ids.shape[1], device=ids.device)
    on = row_on[:, None] & (entry < bias_counts.index_select(0, slot)[:, None]) & (ids >= 0) & (ids < vocab)
    logits.scatter_add_(1, torch.where(on, ids, 0).to(torch.int64), torch.where(on, values, 0.0))
