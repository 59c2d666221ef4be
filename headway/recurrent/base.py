"""What recurrent layers cache, and what their kernels read of a step.

A state belongs to a slot. Its first part is the window of a convolution, as a ring that is indexed by position, its
second the recurrent state; some layers have only one of them. No host work resets either: a row that starts at
position 0 does not read them, and rows that are zombies or padding do not write them.

With drafts a recurrent state is not written at every step, but kept as it was some tokens ago, beside a ring of the
inputs since then (the idea of ReplaySSM, Dao AI Lab and NVIDIA 2026). A row runs these again, and then its own tokens. Which
inputs of the ring count is told by positions alone, which the device owns, so rejected drafts need no rollback: the next row
begins where the accepted ones end, and writes over what lies behind.

Shapes: T tokens of the step, S slots, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from headway.core.cache import CONV, SSM, CacheKind, CacheSpec, Part
from headway.core.chunks import LOADS_AT, SAVES_AT
from headway.kernels.causal_conv import causal_conv
from headway.kernels.copy_states import copy_states
from headway.kernels.replay_rows import replay_rows
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


def state_of(*parts: Part) -> CacheSpec:
    """The state of a layer."""
    return CacheSpec(CacheKind.STATE, parts)


def window(channels: int, taps: int) -> Part:
    """The window of a convolution of ``taps`` over ``channels``, [taps, channels] in the model's dtype."""
    return Part(CONV, (taps, channels))


def recurrent(*shape: int, dtype: str = "float32", inputs: int = 0, inputs_dtype: str = "") -> Part:
    """A recurrent state.

    Args:
        dtype: unless the engine is told otherwise; "": the model's.
        inputs, inputs_dtype: what a token brings into it (``scans`` says what that is of each recurrence), in the model's dtype
            where none is named; 0: the layer cannot verify drafts.
    """
    return Part(SSM, shape, dtype, inputs, inputs_dtype)


RowsOfStep = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]
Replay = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def rows_of(batch: StepBatch) -> RowsOfStep:
    """The arguments in which all operations on states end; see ``kernels.causal_conv``."""
    assert batch.chunks is not None, "the model declares no states"
    return (
        batch.query_start, batch.row_slots, batch.seq_lens, batch.chunks, batch.max_chunks, batch.max_query_len, batch.short
    )  # fmt: skip


def replay_of(batch: StepBatch, own: Sequence[torch.Tensor]) -> Replay:
    """The last arguments of operations on recurrent states, ``own``: a layer's state and, where there are rings, its ring."""
    return (own[1], batch.stored_at, batch.store_at) if len(own) > 1 else (None, None, None)


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


def load_states(batch: StepBatch, caches: CachePool) -> None:
    """Copy checkpoints to the slots of rows that begin behind a cached prefix, and say which rows store their states; before
    the first layer, and of a step that is cut before the first slice."""
    storage, packed = caches.state_storage, batch.chunks
    if storage is None or packed is None or batch.is_slice:
        return
    if batch.max_copies:
        copy_states(storage, packed, LOADS_AT, batch.max_copies)
    if batch.stored_at is not None:
        replay_rows(
            storage, packed, batch.query_start, batch.row_slots, batch.seq_lens, batch.stored_at, batch.store_at,
            caches.replays, batch.short,
        )  # fmt: skip


def save_states(batch: StepBatch, caches: CachePool) -> None:
    """Copy slots to checkpoints; behind the last layer, and of a step that is cut behind the last slice."""
    if batch.max_copies and not batch.is_slice and batch.chunks is not None and caches.state_storage is not None:
        copy_states(caches.state_storage, batch.chunks, SAVES_AT, batch.max_copies)
