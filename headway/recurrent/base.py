"""What recurrent layers cache, and what their kernels read of a step.

A state belongs to a slot. Its first part is the window of a convolution, as a ring that is indexed by position, its
second the recurrent state; some layers have only one of them. No host work resets either: a row that starts at
position 0 does not read them, and rows that are zombies or padding do not write them.

Shapes: T tokens of the step, S slots, C channels.
"""

from __future__ import annotations

from typing import cast

import torch

from headway.core.cache import CacheKind, CacheSpec, Part
from headway.core.chunks import LOADS_AT, SAVES_AT
from headway.kernels.causal_conv import causal_conv
from headway.kernels.copy_states import copy_states
from headway.state.batch import StepBatch


def state_of(*parts: Part) -> CacheSpec:
    """The state of a layer."""
    return CacheSpec(CacheKind.STATE, parts)


def window(channels: int, taps: int) -> Part:
    """The window of a convolution of ``taps`` over ``channels``, [taps, channels] in the model's dtype."""
    return Part("conv", (taps, channels))


def recurrent(*shape: int) -> Part:
    """A recurrent state, in float32 unless the engine is told otherwise: rounding at every token adds up."""
    return Part("ssm", shape, "float32")


RowsOfStep = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def rows_of(batch: StepBatch) -> RowsOfStep:
    """The arguments in which all operations on states end; see ``kernels.causal_conv``."""
    assert batch.chunks is not None, "the model declares no states"
    return batch.query_start, batch.row_slots, batch.seq_lens, batch.chunks, batch.max_chunks, batch.max_query_len


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    batch: StepBatch,
    ring: torch.Tensor,
    *,
    silu: bool = True,
) -> torch.Tensor:
    """x [T, C], convolved over each row and its window, ring [S, W, C], which is written; weight [C, W], bias [C]."""
    return cast(torch.Tensor, causal_conv(x, weight, bias, ring, *rows_of(batch), silu))


def load_states(batch: StepBatch, storage: torch.Tensor) -> None:
    """Copy checkpoints to the slots of rows that begin behind a cached prefix; before the first layer. ``storage``: see
    ``CachePool.state_storage``."""
    if batch.max_copies and batch.chunks is not None:
        copy_states(storage, batch.chunks, LOADS_AT, batch.max_copies)


def save_states(batch: StepBatch, storage: torch.Tensor) -> None:
    """Copy slots to checkpoints; behind the last layer."""
    if batch.max_copies and batch.chunks is not None:
        copy_states(storage, batch.chunks, SAVES_AT, batch.max_copies)
