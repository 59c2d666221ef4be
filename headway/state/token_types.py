"""Types of tokens (the first and the second of a pair of texts), as a range of positions in each slot."""

from __future__ import annotations

from typing import Final

import torch

from headway.state.batch import StepBatch
from headway.state.slots import Table

TOKEN_TYPES: Final = "token_types"
"""Slot table: tokens at positions from the first number to before the second are of type 1."""


def type_tables() -> list[Table]:
    """What admissions write, for models with several types."""
    return [Table(TOKEN_TYPES, 2)]


def token_types(batch: StepBatch, ranges: torch.Tensor) -> torch.Tensor:
    """int32 [T], the type of each token; ``ranges``: int32 [S, 2] of the slots. Padding is of some type."""
    token = torch.arange(len(batch.input_ids), device=ranges.device, dtype=torch.int32)
    row = torch.searchsorted(batch.query_start[1:], token, right=True).clamp(max=len(batch.row_slots) - 1)
    slot = batch.row_slots.index_select(0, row).clamp(min=0)
    start, end = ranges.index_select(0, slot).unbind(1)
    return ((batch.positions >= start) & (batch.positions < end)).int()
