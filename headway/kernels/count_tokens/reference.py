"""What ``count_tokens`` means, in torch."""

from __future__ import annotations

import torch

MAX_COUNT = 32767


def count_tokens(
    counts: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
    max_tokens_bound: int,
) -> None:
    if slots.shape[0] == 0:
        return
    num_slots, vocab = counts.shape
    span = max(1, min(max_tokens_bound, history.shape[1]))
    valid = (slots >= 0) & (slots < num_slots)
    # Equal writes of a slot listed twice would add up below: only the first counts.
    same = (slots[:, None] == slots[None, :]).tril(-1)
    valid &= ~same.any(1)
    row = torch.where(valid, slots, 0).to(torch.int64)
    tokens = history[:, :span].index_select(0, row).to(torch.int64)  # [n, span]
    position = torch.arange(span, device=slots.device)
    known = (tokens >= 0) & (tokens < vocab) & (position < num_tokens.index_select(0, row)[:, None])
    prompt = position < prompt_len.index_select(0, row)[:, None]
    tokens = tokens.clamp(0, vocab - 1)
    generated = torch.zeros(len(slots), vocab, dtype=torch.int32, device=slots.device)
    generated.scatter_add_(1, tokens, (known & ~prompt).to(torch.int32))
    prompted = torch.zeros_like(generated).scatter_add_(1, tokens, (known & prompt).to(torch.int32))
    packed = generated.clamp(max=MAX_COUNT) - (prompted > 0).to(torch.int32) * (MAX_COUNT + 1)  # bit 15 is the sign
    old = counts.index_select(0, row)
    counts.index_add_(0, row, torch.where(valid[:, None], packed.to(torch.int16) - old, torch.zeros_like(old)))
