"""What every sampling feature looks like."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from headway.core.messages import AddRequest
from headway.core.plan import Floats, Int32s
from headway.state.slots import SlotArena


class SlotEdit(NamedTuple):
    """Values for the first columns of one slot's row of a table, as int32 (floats as their bits)."""

    table: str
    values: Int32s


def ints(*values: int) -> Int32s:
    """A row of integers."""
    return np.array(values, np.int32)


def float_bits(values: Floats | list[float]) -> Int32s:
    """Floats as the int32 of the same bits, which is how the arena stores them."""
    bits: Int32s = np.asarray(values, np.float32).view(np.int32)
    return bits


class Feature(Protocol):
    """One kind of logit edit. Steps in which no row wants it skip its kernel."""

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """What the slot's tables must hold for ``request``, resetting what an earlier owner left. Pure.

        Raises:
            InvalidRequestError: the request does not fit the tables.
        """

    def wanted(self, request: AddRequest) -> bool:
        """Whether ``request`` uses the feature."""

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Edit ``logits`` [N, V] in place: float32, or as the model made them if the step's edits only forbid tokens.
        ``slots`` is int32 [N], -1 on padding."""


class Tables(NamedTuple):
    """What a feature is built with: where its tables will live and how large they are."""

    arena: SlotArena
    num_slots: int
    vocab_size: int
