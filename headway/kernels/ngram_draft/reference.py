"""What ``ngram_draft`` means, in torch."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import gather_rows, masked_write_


def ngram_draft(
    drafts: torch.Tensor,
    row_slots: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    min_n: int,
    max_n: int,
) -> None:
    (num_slots, length), number = history.shape, drafts.shape[1]
    slot = torch.where((row_slots >= 0) & (row_slots < num_slots), row_slots, 0).to(torch.int64)
    known = num_tokens.index_select(0, slot).clamp(max=length)  # [R]
    real = (row_slots >= 0) & (row_slots < num_slots) & (known > 0)
    text = history.index_select(0, slot)  # [R, L]
    place = torch.arange(length, device=history.device, dtype=torch.int32)  # [L]
    equal = place < (known - 1)[:, None]  # so far
    matched = torch.zeros_like(text)
    for back in range(min(max_n, length)):
        last = gather_rows(text, torch.arange(len(text), device=text.device), known - 1 - back)  # [R]
        shifted = torch.roll(text, back, 1)  # [R, L], the token `back` before each place
        equal = equal & (shifted == last[:, None]) & (place >= back)
        matched = matched + equal.to(torch.int32)
    score = torch.where(matched >= min_n, matched.to(torch.int64) * 2**32 + place, -1)
    best = score.amax(1)
    found = torch.where(best >= 0, (best % 2**32).to(torch.int32), known - 2)  # [R]
    ahead = torch.arange(number, device=history.device, dtype=torch.int32)
    period = (known - 1 - found).clamp(min=1)[:, None]
    source = found[:, None] + 1 + ahead % period
    guess = gather_rows(history, slot[:, None].expand(source.shape), source)
    masked_write_(drafts, slot[:, None] * number + ahead, guess, real[:, None].expand(source.shape))
