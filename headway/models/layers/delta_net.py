"""The gated delta net (Yang et al. 2024) and Kimi delta attention (Kimi team 2025).

Shapes: T tokens of the step, HK heads of queries and keys of K, H heads of values of V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from headway.core.cache import CacheSpec
from headway.kernels.delta_decode import delta_decode
from headway.kernels.gated_rms_norm import gated_rms_norm
from headway.models.interface import Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Convolution, Mixer, Site, StateMixer, StateSpec, parameter, product_out
from headway.parallel.group import Group
from headway.parallel.shard import EvenShard
from headway.recurrent.base import recurrent, replay_of, rows_of, state_of, window
from headway.recurrent.scans import delta_inputs, delta_rule
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNetSpec(StateSpec):
    """A gated delta net.

    Attributes:
        num_key_heads, num_heads, key_dim, value_dim: HK, H, K, V.
        taps: width of the convolution over queries, keys and values.
        beta_scale: 2 where eigenvalues may be negative, else 1.
        norm_eps: of the norm beside the gate.
        layout: how the checkpoint has the products in: "grouped": queries, keys, values and gates, and the two of the rule,
            interleaved by key head (Qwen3-Next); "joined": queries, keys and values in one tensor (Qwen3.5); "separate" (OLMo).
        names: of the norm, and of the product out.
        shard: the heads are these of more; None: they are all.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int
    beta_scale: float = 1.0
    norm_eps: float = 1e-6
    layout: Literal["grouped", "joined", "separate"] = "grouped"
    names: tuple[str, str] = ("norm", "out_proj")
    shard: EvenShard | None = None

    def sharded(self, group: Group) -> DeltaNetSpec:
        """What this rank of ``group`` has of it; all where heads cannot be dealt out evenly."""
        size = group.size
        if self.num_key_heads % size:
            return self
        heads, keys = self.num_heads // size, self.num_key_heads // size
        return replace(self, num_heads=heads, num_key_heads=keys, shard=EvenShard(group))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of all heads: queries, keys, values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_heads * self.value_dim

    @property
    def state(self) -> CacheSpec:
        shape = self.num_heads, self.key_dim, self.value_dim
        inputs = delta_inputs(self.num_key_heads, *shape)
        return state_of(window(sum(self.sizes), self.taps), recurrent(*shape, inputs=inputs, inputs_dtype="float32"))

    @property
    def parts(self) -> Mapping[str, int]:
        """The products in, whose outputs are in this order: queries, keys, values, gates, beta, decays."""
        q, k, v = self.sizes
        heads = self.num_heads
        if self.layout == "grouped":
            return {"in_proj_qkvz": q + k + 2 * v, "in_proj_ba": 2 * heads}
        if self.layout == "joined":
            return {"in_proj_qkv": q + k + v, "in_proj_z": v, "in_proj_b": heads, "in_proj_a": heads}
        return {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": v, "b_proj": heads, "a_proj": heads}

    @property
    def order(self) -> torch.Tensor | None:
        """int64, the checkpoint's rows in our order; None: they are in it."""
        if self.layout != "grouped":
            return None
        share, groups = self.num_heads // self.num_key_heads, self.num_key_heads
        widths = (self.key_dim, self.key_dim, share * self.value_dim, share * self.value_dim)
        first = torch.arange(groups * sum(widths)).view(groups, -1).split(widths, dim=1)
        second = (groups * sum(widths) + torch.arange(2 * self.num_heads)).view(groups, -1).split(share, dim=1)
        return torch.cat([each.flatten() for each in (*first, *second)])

    def make(self, site: Site) -> Mixer:
        return DeltaNet(self, site.hidden, dtype=site.dtype, device=site.device)


class DeltaMixer(StateMixer):
    """What stands between the products of these layers, whose decays are by head or by channel.

    Attributes:
        conv, norm: over queries, keys and values; [V], of the norm beside the gate.
        a_log, dt_bias: f32, of the decays.
        heads: (HK, K), (H, V).
        beta_scale, norm_eps, sigmoid: see ``gated_delta`` and ``gated_rms_norm``.
    """

    conv: Convolution
    norm: torch.nn.Parameter
    a_log: torch.nn.Parameter
    dt_bias: torch.nn.Parameter
    heads: tuple[tuple[int, int], tuple[int, int]]
    beta_scale, norm_eps, sigmoid = 1.0, 1e-6, False

    def recur(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        gate: torch.Tensor,
        batch: StepBatch,
        cache: LayerCache,
    ) -> torch.Tensor:
        """[T, 2 HK K + H V], [T, H] or [T, H, K], [T, H], [T, H V] -> [T, H V]; writes window, state and ring."""
        ring, *own = cache
        keys, values = self.heads
        rule, norm = (decay, self.a_log, self.dt_bias, beta), (gate, self.norm, self.norm_eps)
        if batch.max_query_len <= batch.short:  # others have chunks, which are dealt out to programs of their own
            window, scale = (qkv, self.conv.weight, ring), keys[1] ** -0.5
            step = *norm, self.sigmoid, *rows_of(batch), *replay_of(batch, own)
            return cast(torch.Tensor, delta_decode(*window, *rule, self.beta_scale, scale, own[0], *step))
        sizes = math.prod(keys), math.prod(keys), math.prod(values)
        q, k, v = self.conv.forward(qkv, batch, ring).split(sizes, dim=1)
        q, k, v = q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values)
        o = delta_rule(q, k, v, *rule, batch, own, beta_scale=self.beta_scale).flatten(1)
        return cast(torch.Tensor, gated_rms_norm(o, *norm, values[1], False, self.sigmoid))


class DeltaNet(DeltaMixer):
    """The layer of ``spec``."""

    def __init__(self, spec: DeltaNetSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.heads = (spec.num_key_heads, spec.key_dim), (spec.num_heads, spec.value_dim)
        self.beta_scale, self.norm_eps = spec.beta_scale, spec.norm_eps
        self.into = Linear(hidden, spec.parts, bias=False, dtype=dtype, device=device)
        self.conv = Convolution(sum(spec.sizes), spec.taps, bias=False, dtype=dtype, device=device)
        self.norm = parameter(spec.value_dim, dtype=dtype, device=device)
        self.a_log = parameter(spec.num_heads, dtype=torch.float32, device=device)
        self.dt_bias = parameter(spec.num_heads, dtype=torch.float32, device=device)
        shard, (q, k, v) = spec.shard, spec.sizes
        self.out = product_out(v, spec.names[1], hidden, shard, bias=False, dtype=dtype, device=device)
        if shard is not None:  # heads lie side by side in each tensor, but where it holds several sections
            sections = {"in_proj_qkv": (q, k, v)}
            self.into.taken = {name: shard.rows(*sections.get(name, (rows,))) for name, rows in spec.parts.items()}

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """Queries, keys, values, gates, beta, decays side by side -> [T, H V]."""
        spec = self.spec
        q, k, v = spec.sizes
        qkv, gate, beta, decay = x.split((q + k + v, v, spec.num_heads, spec.num_heads), dim=1)
        return self.recur(qkv, decay, beta, gate, batch, cache)

    def destinations(self, prefix: str) -> dict[str, Target]:
        spec, shard = self.spec, self.spec.shard

        def own(tensor: torch.Tensor) -> Target:
            return Target.part(tensor, None if shard is None else shard.rows(len(tensor)))

        found = self.into.destinations(prefix, spec.order) | self.out.destinations(prefix)
        for name, tensor in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            found[f"{prefix}{name}"] = own(tensor)
        found[f"{prefix}{spec.names[0]}.weight"] = Target(self.norm)
        if spec.layout != "separate":
            taken = None if shard is None else shard.rows(*spec.sizes)
            return found | self.conv.destinations(f"{prefix}conv1d.", taken)
        parts = self.conv.weight.split(spec.sizes)
        return found | {
            f"{prefix}{name}_conv1d.weight": own(weight[:, None]) for name, weight in zip("qkv", parts, strict=True)
        }
