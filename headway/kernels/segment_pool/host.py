"""``segment_pool`` on a CPU: row by row, so that a row's bits are its own."""

from __future__ import annotations

import torch


def available() -> bool:
    """It needs nothing but torch."""
    return True


def segment_pool(
    hidden: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, skip: torch.Tensor, kind: int
) -> torch.Tensor:
    out = torch.full((seq_lens.shape[0], hidden.shape[1]), float("-inf") if kind == 1 else 0.0)
    ends = query_start[1:]
    columns = (query_start[:-1], ends, seq_lens, skip)
    rows = zip(*(column.tolist() for column in columns), strict=True)  # host: a CPU operation
    for row, (start, end, length, skipped) in enumerate(rows):
        first = length - (end - start)  # position of the row's first token
        begin = start + max(skipped - first, 0)
        if not length or begin >= end:
            continue
        wide = hidden[begin:end].float()
        if kind == 1:
            torch.amax(wide, 0, out=out[row])
        elif kind == 2:
            weights = torch.arange(first + begin - start + 1, length + 1, dtype=torch.float32)
            torch.sum(wide * weights[:, None], 0, out=out[row])
        else:
            torch.sum(wide, 0, out=out[row])
    return out
