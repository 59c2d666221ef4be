"""The meaning of ``store_rows``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch


def store_rows(table: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    last = table.shape[0] - 1
    known = (places >= 0) & (places <= last)
    # Rows without a place rewrite the last row of the table with what it is to hold.
    of_last = (places == last) & known
    kept = torch.where(of_last[:, None], rows, 0).sum(0) if len(rows) else table[last]
    kept = torch.where(of_last.any(), kept, table[last])
    table.index_copy_(0, torch.where(known, places, last).long(), torch.where(known[:, None], rows, kept))
