"""What slots say of their tokens: types (the first and the second of a pair of texts), as a range of positions; adapters."""

from __future__ import annotations

from typing import Final

import torch

from headway.state.batch import StepBatch
from headway.state.slots import Table

TOKEN_TYPES: Final = "token_types"
"""Slot table: tokens at positions from the first number to before the second are of type 1."""


ADAPTER: Final = "adapter"
"""Slot table: the number of the adapter that all of its tokens run with, 0 for none."""


def type_tables(num_token_types: int, num_adapters: int) -> list[Table]:
    """What admissions write, for models with several types, and with adapters."""
    types = [Table(TOKEN_TYPES, 2)] if num_token_types > 1 else []
    return [*types, Table(ADAPTER)] if num_adapters else types


def slots_of_tokens(batch: StepBatch) -> torch.Tensor:
    """int32 [T], each token's slot; some slot of padding."""
    token = torch.arange(len(batch.input_ids), device=batch.input_ids.device, dtype=torch.int32)
    row = torch.searchsorted(batch.query_start[1:], token, right=True).clamp(max=len(batch.row_slots) - 1)
    return batch.row_slots.index_select(0, row).clamp(min=0)


def token_types(batch: StepBatch, ranges: torch.Tensor) -> torch.Tensor:
    """int32 [T], the type of each token; ``ranges``: int32 [S, 2] of the slots. Padding is of some type."""
    start, end = ranges.index_select(0, slots_of_tokens(batch)).unbind(1)
    return ((batch.positions >= start) & (batch.positions < end)).int()
