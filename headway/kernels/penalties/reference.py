"""What ``penalties`` means, in torch."""

from __future__ import annotations

import torch


def penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See the package."""
    in_table = (slots >= 0) & (slots < count_on.shape[0])
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    row_on = in_table & (count_on.index_select(0, slot) != 0)
    count = torch.where(row_on[:, None], counts.index_select(0, slot), 0)  # [N, V]
    times = (count & 32767).to(torch.float32)
    r, f, p = (table.index_select(0, slot)[:, None] for table in (repetition, frequency, presence))
    repeated = torch.where(logits > 0, logits / r, logits * r)
    x = torch.where(count != 0, repeated, logits)
    logits.copy_(torch.where(times > 0, x - f * times - p, x))
