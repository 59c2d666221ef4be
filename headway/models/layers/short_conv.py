"""The gated short convolution of LFM2 (Liquid AI 2025): out(c * conv(b * x)), of three projections of the same input.

Shapes: T tokens of the step, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.core.cache import CacheSpec
from headway.models.interface import Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Convolution, Mixer, Site, StateMixer, StateSpec, product_out
from headway.parallel.group import Group
from headway.parallel.shard import EvenShard
from headway.recurrent.base import state_of, window
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvSpec(StateSpec):
    """A convolution of ``taps`` over ``size`` channels, C or with ``shard`` a part; ``bias``: of it and of both products."""

    size: int
    taps: int
    bias: bool = False
    shard: EvenShard | None = None

    def sharded(self, group: Group) -> ShortConvSpec:
        """What this rank of ``group`` has of it; all where channels cannot be dealt out evenly."""
        if self.size % group.size:
            return self
        return replace(self, size=self.size // group.size, shard=EvenShard(group))

    @property
    def state(self) -> CacheSpec:
        return state_of(window(self.size, self.taps))

    def make(self, site: Site) -> Mixer:
        return ShortConv(self, site.hidden, dtype=site.dtype, device=site.device)


class ShortConv(StateMixer):
    """The layer of ``spec``."""

    def __init__(self, spec: ShortConvSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, shard = spec, spec.shard
        self.into = Linear(hidden, {"in_proj": 3 * spec.size}, bias=spec.bias, dtype=dtype, device=device)
        self.conv = Convolution(spec.size, spec.taps, bias=spec.bias, dtype=dtype, device=device)
        self.out = product_out(spec.size, "out_proj", hidden, shard, bias=spec.bias, dtype=dtype, device=device)
        if shard is not None:
            self.into.taken = {"in_proj": shard.rows(*[spec.size] * 3)}

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """[T, 3 C] -> [T, C]."""
        b, c, inputs = x.chunk(3, dim=1)
        return self.conv.forward(b * inputs, batch, cache[0], silu=False) * c

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.into.destinations(prefix) | self.out.destinations(prefix)
        shard = self.spec.shard
        return found | self.conv.destinations(f"{prefix}conv.", None if shard is None else shard.rows(self.spec.size))
