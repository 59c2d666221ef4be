"""Attention and a Mamba-2 mixer side by side, of the same normalised hidden states (Falcon-H1, Zuo et al. 2025).

Their products in are one matrix, and so are their products out: a layer has as many products as one of the two would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.core.cache import CacheSpec
from headway.models.interface import Target
from headway.models.layers.attention import Attention, AttentionSpec
from headway.models.layers.linear import Linear
from headway.models.layers.mamba import Mamba2, Mamba2Spec
from headway.models.layers.mixer import Mixer, Site, StateMixer
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySideSpec:
    """Both.

    Attributes:
        attention, mamba: the two; neither has biases in its products.
        in_multipliers: of the outputs of the products in: queries, keys, values; then gate, x, b, c, time steps.
        out_multipliers: of what attention and the Mamba mixer give.
        names: of the two in the checkpoint, below the block.
    """

    attention: AttentionSpec
    mamba: Mamba2Spec
    in_multipliers: tuple[float, ...] = (1.0,) * 8
    out_multipliers: tuple[float, float] = (1.0, 1.0)
    names: tuple[str, str] = ("self_attn", "mamba")

    @property
    def cache(self) -> CacheSpec | None:
        return self.attention.cache

    @property
    def state(self) -> CacheSpec:
        return self.mamba.state

    @property
    def rotated(self) -> AttentionSpec:
        return self.attention

    def make(self, site: Site) -> Mixer:
        return SideBySide(self, site)


class SideBySide(StateMixer):
    """The layer of ``spec``."""

    def __init__(self, spec: SideBySideSpec, site: Site) -> None:
        super().__init__()
        hidden, dtype, device = site.hidden, site.dtype, site.device
        self.spec = spec
        attention = Attention(spec.attention, site)
        mamba = Mamba2(spec.mamba, hidden, dtype=dtype, device=device)
        self._outs = [(f"{name}.{part}", linear.weight.shape[1]) for name, linear in zip(
            spec.names, (attention.out, mamba.out), strict=True) for part in linear.parts]  # fmt: skip
        parts = {
            f"{name}.{part}": rows
            for name, linear in zip(spec.names, (attention.into, mamba.into), strict=True)
            for part, rows in linear.parts.items()
        }
        self._rows = sum(attention.into.parts.values())
        self.into = Linear(hidden, parts, bias=False, dtype=dtype, device=device)
        self.out = Linear(sum(size for _, size in self._outs), {"": hidden}, bias=False, dtype=dtype, device=device)
        del attention.qkv, attention.out, mamba.into, mamba.out  # theirs are parts of ours
        self.attention, self.mamba = attention, mamba

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """Projections of both -> what both give, side by side."""
        attended = self.attention.mix(x[:, : self._rows], batch, cache[:2])
        scanned = self.mamba.mix(x[:, self._rows :], batch, cache[2:])
        return torch.cat([attended, scanned], dim=1)

    def finalize(self) -> None:
        """Multipliers become part of the weights."""
        spec, mamba = self.spec, self.spec.mamba
        size = spec.attention.head_dim
        shared = mamba.num_groups * mamba.state_size
        queries, keys = spec.attention.num_heads * size, spec.attention.num_kv_heads * size
        sizes = (queries, keys, keys, mamba.inner, mamba.inner, shared, shared, mamba.num_heads)
        first = 0
        for rows, factor in zip(sizes, spec.in_multipliers, strict=True):
            if factor != 1.0:
                self.into.multiply_rows({first: (first + rows, factor)})
            first += rows
        self.out.weight[:, :queries] *= spec.out_multipliers[0]
        self.out.weight[:, queries:] *= spec.out_multipliers[1]

    def destinations(self, prefix: str) -> dict[str, Target]:
        above = prefix.removesuffix(".").rpartition(".")[0] + "."  # the two lie beside each other in the block
        found = self.into.destinations(above)
        first = 0
        for name, size in self._outs:
            found[f"{above}{name}.weight"] = Target(self.out.weight[:, first : first + size])
            first += size
        return found | self.mamba.own_destinations(f"{above}{self.spec.names[1]}.")
