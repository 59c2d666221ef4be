"""What ``suffix_keep`` means, in torch."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import gather_rows, masked_write_
from headway.kernels.suffix_draft.reference import SHARED


def suffix_keep(
    store: torch.Tensor,
    cursor: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scope: torch.Tensor,
    alive: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    (num_slots, length), size, kept = history.shape, store.shape[0], cursor.shape[0] - 2
    inside = (row_slots >= 0) & (row_slots < num_slots)
    slot = torch.where(inside, row_slots, 0).to(torch.int64)
    end = num_tokens.index_select(0, slot).clamp(max=length)
    number = (end - prompt_len.index_select(0, slot).clamp(min=0)).clamp(max=size // 2 - 1)  # [R]
    ends = inside & (seq_lens > 0) & (alive.index_select(0, slot) == 0)
    ends &= (scope.index_select(0, slot) == SHARED) & (number > 0)
    taken = torch.where(ends, number + 1, 0).to(torch.int64)
    begins = cursor[0] + taken.cumsum(0) - taken  # [R]
    written = cursor[0] + taken.sum()

    column = torch.arange(min(length, size // 2 - 1) + 1, device=store.device)
    source = (end - number)[:, None] + column
    token = torch.where(column < number[:, None], gather_rows(history, slot[:, None].expand(source.shape), source), -1)
    when = begins[:, None] + column
    mask = (column < taken[:, None]) & (when >= written - size)
    masked_write_(store, when % size, token.to(torch.int32), mask)

    answer = cursor[1] + ends.to(torch.int64).cumsum(0) - 1
    count = cursor[1] + ends.sum()
    masked_write_(cursor, 2 + answer.clamp(min=0) % kept, begins, ends & (answer >= count - kept))
    cursor[0].copy_(written)
    cursor[1].copy_(count)
