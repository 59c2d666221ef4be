"""What ``allowed_tokens`` means, in torch."""

from __future__ import annotations

import torch


def allowed_tokens(
    logits: torch.Tensor, slots: torch.Tensor, allowed_on: torch.Tensor, allowed_bits: torch.Tensor
) -> None:
    num_slots, vocab = allowed_on.shape[0], logits.shape[1]
    in_table = (slots >= 0) & (slots < num_slots)
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    row_on = in_table & (allowed_on.index_select(0, slot) != 0)
    words = allowed_bits.view(num_slots, -1).index_select(0, slot)  # [N, W]
    words = torch.where(row_on[:, None], words, -1)
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((words[:, :, None] >> bit) & 1) == 0  # the arithmetic shift is harmless: one bit is kept
    logits.masked_fill_(forbidden.flatten(1)[:, :vocab], float("-inf"))
