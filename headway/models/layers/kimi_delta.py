"""Kimi delta attention (Kimi team 2025, arXiv:2510.26692): the gated delta rule with a decay for each channel of the keys.

Decays and gates are low-rank products of the hidden states, through as many numbers as a head has; the gate's sigmoid
multiplies the normalised result. The rest is the gated delta net's (``layers.delta_net``), and the rule is the same kernel.

Shapes: T tokens of the step, H heads of D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.core.cache import CacheSpec
from headway.models.interface import Target
from headway.models.layers.delta_net import DeltaMixer
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Convolution, Mixer, Site, StateSpec, parameter
from headway.recurrent.base import recurrent, state_of, window
from headway.recurrent.scans import delta_inputs
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaSpec(StateSpec):
    """Kimi delta attention.

    Attributes:
        num_heads, head_dim: H, D, of queries, keys and values alike.
        taps: width of the convolution over these.
        norm_eps: of the norm beside the gate.
    """

    num_heads: int
    head_dim: int
    taps: int
    norm_eps: float

    @property
    def inner(self) -> int:
        """H D."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> CacheSpec:
        heads, dim = self.num_heads, self.head_dim
        inputs = delta_inputs(heads, heads, dim, dim, by_channel=True)
        return state_of(
            window(3 * self.inner, self.taps), recurrent(heads, dim, dim, inputs=inputs, inputs_dtype="float32")
        )

    def make(self, site: Site) -> Mixer:
        return KimiDelta(self, site.hidden, dtype=site.dtype, device=site.device)


class KimiDelta(DeltaMixer):
    """The layer of ``spec``."""

    sigmoid = True

    def __init__(self, spec: KimiDeltaSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, inner, size = spec, spec.inner, spec.head_dim
        self.heads, self.norm_eps = ((spec.num_heads, size), (spec.num_heads, size)), spec.norm_eps
        parts = {"q_proj": inner, "k_proj": inner, "v_proj": inner, "f_a_proj": size, "g_a_proj": size}
        parts["b_proj"] = spec.num_heads
        self._sizes = (3 * inner, size, size, spec.num_heads)
        self.into = Linear(hidden, parts, bias=False, dtype=dtype, device=device)
        self.conv = Convolution(3 * inner, spec.taps, bias=False, dtype=dtype, device=device)
        self.decays = Linear(size, {"f_b_proj": inner}, bias=False, dtype=dtype, device=device)
        self.gates = Linear(size, {"g_b_proj": inner}, bias=False, dtype=dtype, device=device)
        self.a_log = parameter(spec.num_heads, dtype=torch.float32, device=device)
        self.dt_bias = parameter(spec.num_heads, size, dtype=torch.float32, device=device)
        self.norm = parameter(size, dtype=dtype, device=device)
        self.out = Linear(inner, {"o_proj": hidden}, bias=False, dtype=dtype, device=device)

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """Queries, keys, values, what decays and gates are products of, beta, side by side -> [T, H D]."""
        qkv, decay, gate, beta = x.split(self._sizes, dim=1)
        decay = self.decays.forward(decay.contiguous()).unflatten(1, self.heads[0])
        return self.recur(qkv, decay, beta, self.gates.forward(gate.contiguous()), batch, cache)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found: dict[str, Target] = {}
        for product in (self.into, self.decays, self.gates, self.out):
            found |= product.destinations(prefix)
        found[f"{prefix}A_log"] = Target(self.a_log.view(1, 1, -1, 1))
        found[f"{prefix}dt_bias"] = Target(self.dt_bias.flatten())
        found[f"{prefix}o_norm.weight"] = Target(self.norm)
        parts = self.conv.weight.split(self.spec.inner)
        return found | {f"{prefix}{n}_conv1d.weight": Target(w[:, None]) for n, w in zip("qkv", parts, strict=True)}
