"""Penalties, temperature, top-k, top-p, min-p, seeds: the draw itself."""

from __future__ import annotations

import numpy as np
import torch

from headway.core.messages import AddRequest
from headway.kernels.sample import MIN_P, PENALTIES, RANDOM, TOP, TWICE, WIDE, WIDE_K, may_be_wide, sample
from headway.sampling.feature import SlotEdit, Tables, float_bits, ints
from headway.sampling.penalties import Penalties
from headway.state.slots import Table

FILTERED = RANDOM | TOP | MIN_P | PENALTIES
ALL_PATHS = FILTERED | WIDE | TWICE
"""Flags of ``sample``: penalties, and any filters of rows that are not wide; any rows at all."""


class Draw:
    """Chooses one token per row. Stateless: the draw is a function of the request's seed and the position alone."""

    def __init__(self, at: Tables, penalties: Penalties) -> None:
        self._penalties = penalties
        view = at.arena.view
        self._temperature, self._top_k, self._top_p = view("temperature"), view("top_k"), view("top_p")
        self._min_p, self._seeds, self._num_tokens = view("min_p"), view("seeds"), view("num_tokens")

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Slot tables; seeds are (low, high) words."""
        reals = [Table(name, dtype=torch.float32) for name in ("temperature", "top_p", "min_p")]
        return [*reals, Table("top_k"), Table("seeds", 2)]

    def seed(self, request: AddRequest) -> SlotEdit:
        """The request's seed."""
        return SlotEdit("seeds", np.array([request.seed & (2**64 - 1)], np.uint64).view(np.int32))

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """The request's sampling numbers but the seed."""
        params = request.params
        return [
            SlotEdit("temperature", float_bits([params.temperature])),
            SlotEdit("top_p", float_bits([params.top_p])),
            SlotEdit("min_p", float_bits([params.min_p])),
            SlotEdit("top_k", ints(params.top_k)),
        ]

    def flags(self, request: AddRequest) -> int:
        """The paths that the request's rows need."""
        params = request.params
        flags = PENALTIES if self._penalties.wanted(request) else 0
        if not params.is_greedy:
            flags |= RANDOM
            flags |= TOP if params.top_k > 0 or params.top_p < 1.0 else 0
            flags |= MIN_P if params.min_p > 0.0 else 0
            flags |= WIDE if may_be_wide(params.top_k, params.top_p, params.min_p) else 0
            flags |= TWICE if params.top_k > WIDE_K and params.top_p < 1.0 else 0
        return flags

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, flags: int) -> torch.Tensor:
        """int32 [N] tokens from ``logits`` [N, V]."""
        return sample(
            logits,
            slots,
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            self._seeds,
            self._num_tokens,
            *self._penalties.tensors,
            flags,
        )
