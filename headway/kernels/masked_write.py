"""Masked writes to tables in torch, without reading the device and without a race."""

from __future__ import annotations

import torch


def masked_write_(table: torch.Tensor, index: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
    """``table.view(-1)[index] = values`` where ``mask``; nothing is written elsewhere.

    The difference to the old value is added, and zero where masked off: two's complement makes that exact for
    integers, and masked-off lanes may then share a place with a real write. Real writes must have distinct places.

    Args:
        table: contiguous, of an integer dtype.
        index, values, mask: of one shape; masked-off indices may be anything.
    """
    flat = table.view(-1)
    place = torch.where(mask, index, 0).to(torch.int64).reshape(-1)
    old = flat.gather(0, place)
    new = values.to(table.dtype).reshape(-1)
    flat.scatter_add_(0, place, torch.where(mask.reshape(-1), new - old, torch.zeros_like(old)))


def gather_rows(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``table[rows, columns]``, with both indices clamped into the table.

    Args:
        table: [S, W], contiguous.
        rows, columns: of one shape after broadcasting, any integer dtype.
    """
    height, width = table.shape
    place = rows.to(torch.int64).clamp(0, height - 1) * width + columns.to(torch.int64).clamp(0, width - 1)
    return table.view(-1).take(place)


def forbid_(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """``logits[n, ids[n, j]] = -inf`` where ``mask[n, j]``; an id may be listed twice.

    Args:
        logits: float [N, V].
        ids, mask: integer and bool [N, J]; masked-off ids may be anything.
    """
    lowest = torch.where(mask, float("-inf"), float("inf")).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(mask, ids, 0).to(torch.int64), lowest, "amin")
