"""Lightning attention (Qin et al. 2024, arXiv:2401.04658): linear attention whose state decays at a fixed rate, by head.

The state is S = exp(-slope) S + k v^T, the result q S: ``ssd_scan`` without time steps, values being its inputs.

Shapes: T tokens of the step, H heads of D.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F

from headway.core.cache import CacheSpec
from headway.kernels.gated_rms_norm import gated_rms_norm
from headway.models.interface import Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Mixer, Site, StateMixer, StateSpec, parameter
from headway.recurrent.base import recurrent, state_of
from headway.recurrent.scans import head_inputs, scan_heads
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningSpec(StateSpec):
    """Lightning attention.

    Attributes:
        num_heads, head_dim: H, D.
        slopes: per head, > 0.
        norm_eps: of the norm beside the gate, over all heads.
    """

    num_heads: int
    head_dim: int
    slopes: tuple[float, ...] = field(compare=False)
    norm_eps: float = 1e-6

    @property
    def inner(self) -> int:
        """H D."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> CacheSpec:
        heads, dim = self.num_heads, self.head_dim
        return state_of(recurrent(heads, dim, dim, inputs=head_inputs(heads, dim, heads, dim, steps=False)))

    def make(self, site: Site) -> Mixer:
        return Lightning(self, site.hidden, dtype=site.dtype, device=site.device)


class Lightning(StateMixer):
    """The layer of ``spec``: queries, keys, values and the gate are one product."""

    rates: torch.Tensor

    def __init__(self, spec: LightningSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, inner = spec, spec.inner
        parts = {"qkv_proj": 3 * inner, "output_gate": inner}
        self.into = Linear(hidden, parts, bias=False, dtype=dtype, device=device)
        self.norm = parameter(inner, dtype=dtype, device=device)
        self.out = Linear(inner, {"out_proj": hidden}, bias=False, dtype=dtype, device=device)
        rates = -torch.tensor(spec.slopes, dtype=torch.float32)
        self.register_buffer("rates", rates.to(device), persistent=False)

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """Queries, keys, values, gates side by side, [T, 4 H D] -> [T, H D]."""
        spec, inner = self.spec, self.spec.inner
        shape = (spec.num_heads, spec.head_dim)
        q, k, v = (each.unflatten(1, shape) for each in F.silu(x[:, : 3 * inner]).split(inner, dim=1))
        o = scan_heads(v, None, None, self.rates, k, q, None, batch, cache).flatten(1)
        return cast(torch.Tensor, gated_rms_norm(o, x[:, 3 * inner :], self.norm, spec.norm_eps, inner, False, True))

    def destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes; it has query, key and value head by head."""
        inner, shape = self.spec.inner, (self.spec.num_heads, 3, self.spec.head_dim)
        heads = torch.arange(3 * inner).view(shape).transpose(0, 1).flatten()
        found = self.into.destinations(prefix, torch.cat([heads, torch.arange(3 * inner, 4 * inner)]))
        return found | self.out.destinations(prefix) | {f"{prefix}norm.weight": Target(self.norm)}
