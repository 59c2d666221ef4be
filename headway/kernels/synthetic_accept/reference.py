"""What ``synthetic_accept`` means, in torch."""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF
GOLDEN, MIXER = 0x9E3779B1, 0x7FEB352D


def synthetic_accept(
    token_ids: torch.Tensor,
    row_slots: torch.Tensor,
    drafts: torch.Tensor,
    num_tokens: torch.Tensor,
    seeds: torch.Tensor,
    offset: int,
    always: int,
    part: int,
    vocab: int,
) -> None:
    num_slots, number = drafts.shape
    if offset >= number:
        return
    real = (row_slots >= 0) & (row_slots < num_slots)
    slot = torch.where(real, row_slots, 0).to(torch.int64)
    draft = drafts[:, offset].index_select(0, slot)
    seed = seeds[:, 0].index_select(0, slot).to(torch.int64) & WORD
    mixed = (seed * GOLDEN + num_tokens.index_select(0, slot).to(torch.int64)) & WORD
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * MIXER) & WORD
    right = (mixed >> 8) < part if offset == always else torch.full_like(real, offset < always)
    other = torch.where(token_ids == draft, (token_ids + 1) % vocab, token_ids)
    token_ids.copy_(torch.where(real, torch.where(right, draft, other), token_ids))
