"""The gated short convolution of LFM2 (Liquid AI 2025): out(c * conv(b * x)), of three projections of the same input.

Shapes: T tokens of the step, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.core.cache import CacheSpec
from headway.models.interface import Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Convolution, Mixer, StateMixer, StateSpec
from headway.recurrent.base import state_of, window
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvSpec(StateSpec):
    """A convolution of ``taps`` over ``size`` = C channels; ``bias``: of it and of both products."""

    size: int
    taps: int
    bias: bool = False

    @property
    def state(self) -> CacheSpec:
        return state_of(window(self.size, self.taps))

    def build(self, hidden: int, dtype: torch.dtype, device: torch.device) -> Mixer:
        return ShortConv(self, hidden, dtype=dtype, device=device)


class ShortConv(StateMixer):
    """The layer of ``spec``."""

    def __init__(self, spec: ShortConvSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.into = Linear(hidden, {"in_proj": 3 * spec.size}, bias=spec.bias, dtype=dtype, device=device)
        self.conv = Convolution(spec.size, spec.taps, bias=spec.bias, dtype=dtype, device=device)
        self.out = Linear(spec.size, {"out_proj": hidden}, bias=spec.bias, dtype=dtype, device=device)

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """[T, 3 C] -> [T, C]."""
        b, c, inputs = x.chunk(3, dim=1)
        return self.conv.forward(b * inputs, batch, cache[0], silu=False) * c

    def destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes."""
        found = self.into.destinations(prefix) | self.out.destinations(prefix)
        return found | self.conv.destinations(f"{prefix}conv.")
