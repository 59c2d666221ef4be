"""The mixers of Mamba-1 (Gu and Dao 2023) and Mamba-2 (Dao and Gu 2024).

Shapes: T tokens of the step, D inner channels, N state size, H heads of P channels, G groups of heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from headway.core.cache import CacheSpec
from headway.kernels.gated_rms_norm import gated_rms_norm
from headway.kernels.rms_norm import rms_norm
from headway.kernels.silu_mul import silu_mul
from headway.models.interface import Target
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Convolution, Mixer, Site, StateMixer, StateSpec, parameter, product_out
from headway.parallel.group import Group
from headway.parallel.shard import EvenShard, Taken
from headway.recurrent.base import recurrent, state_of, window
from headway.recurrent.scans import LONGEST_STEP, channel_inputs, head_inputs, scan_channels, scan_convolved_heads
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaSpec(StateSpec):
    """A Mamba-1 mixer.

    Attributes:
        inner, state_size, rank, taps: D, N, inputs of the time steps' product, width of the convolution.
        bias, conv_bias: of the products in and out, and of the convolution.
        norms: RMS norms of time steps, b and c: "" none, "plain" without weights (FalconMamba), "weighted" (Jamba).
        norm_eps: of those.
        state_dtype: of the recurrent state; "": the model's.
        shard: the channels are these of more; None: they are all.
    """

    inner: int
    state_size: int
    rank: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    norms: str = ""
    norm_eps: float = 1e-6
    state_dtype: str = ""
    shard: EvenShard | None = None

    def sharded(self, group: Group) -> MambaSpec:
        """What this rank of ``group`` has of it; all where channels cannot be dealt out evenly."""
        if self.inner % group.size:
            return self
        return replace(self, inner=self.inner // group.size, shard=EvenShard(group))

    @property
    def state(self) -> CacheSpec:
        inputs = channel_inputs(self.inner, self.state_size)
        state = recurrent(self.inner, self.state_size, dtype=self.state_dtype, inputs=inputs)
        return state_of(window(self.inner, self.taps), state)

    def make(self, site: Site) -> Mixer:
        return Mamba(self, site.hidden, dtype=site.dtype, device=site.device)


class Mamba(StateMixer):
    """The selective state space of ``spec``."""

    def __init__(self, spec: MambaSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        inner, size, rank = spec.inner, spec.state_size, spec.rank
        self.into = Linear(hidden, {"in_proj": 2 * inner}, bias=spec.bias, dtype=dtype, device=device)
        self.conv = Convolution(inner, spec.taps, bias=spec.conv_bias, dtype=dtype, device=device)
        shard = spec.shard
        self.x_proj = product_out(inner, "x_proj", rank + 2 * size, shard, bias=False, dtype=dtype, device=device)
        self.dt_proj = Linear(rank, {"dt_proj": inner}, bias=False, dtype=dtype, device=device)
        self.out = product_out(inner, "out_proj", hidden, shard, bias=spec.bias, dtype=dtype, device=device)
        self._own: Taken | None = None
        if shard is not None:
            self._own = shard.rows(inner)
            self.into.taken, self.dt_proj.taken = {"in_proj": shard.rows(inner, inner)}, {"dt_proj": self._own}
        wide = partial(parameter, dtype=torch.float32, device=device)
        self.dt_bias, self.d, self.a = wide(inner), wide(inner), wide(inner, size)
        sizes = (rank, size, size) if spec.norms else ()
        self.norms = nn.ParameterList([parameter(n, dtype=dtype, device=device) for n in sizes])

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """[T, 2 D] -> [T, D]."""
        spec = self.spec
        ring, *own = cache
        inputs, gate = x.split((spec.inner, spec.inner), dim=1)
        inputs = self.conv.forward(inputs, batch, ring)
        dt, b, c = self.x_proj.forward(inputs).split((spec.rank, spec.state_size, spec.state_size), dim=1)
        if spec.norms:
            dt, b, c = (
                rms_norm(each.contiguous(), weight, spec.norm_eps)
                for each, weight in zip((dt, b, c), self.norms, strict=True)
            )
        steps = self.dt_proj.forward(dt)
        return scan_channels(inputs, steps, self.dt_bias, self.a, b, c, self.d, gate, batch, own)

    def finalize(self) -> None:
        """The checkpoint has log(-a)."""
        self.a.copy_(-self.a.exp())
        if self.spec.norms == "plain":
            for weight in self.norms:
                weight.fill_(1.0)

    def destinations(self, prefix: str) -> dict[str, Target]:
        named = {"dt_proj.bias": self.dt_bias, "D": self.d, "A_log": self.a}
        found = {f"{prefix}{name}": Target.part(tensor, self._own) for name, tensor in named.items()}
        for linear in (self.into, self.x_proj, self.dt_proj, self.out):
            found |= linear.destinations(prefix)
        if self.spec.norms == "weighted":
            names = ("dt_layernorm", "b_layernorm", "c_layernorm")
            found |= {f"{prefix}{name}.weight": Target(w) for name, w in zip(names, self.norms, strict=True)}
        return found | self.conv.destinations(f"{prefix}conv1d.", self._own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Spec(StateSpec):
    """A Mamba-2 mixer.

    Attributes:
        num_heads, head_dim, state_size, num_groups: H, P, N, G.
        taps: width of the convolution.
        bias, conv_bias, out_bias: of the products in, of the convolution, and of the product out.
        limits: of the time steps.
        norm: of the result beside the gate: "gate first", "gate last", or "" for the gate alone.
        norm_groups: parts of the inner channels that are normalised for themselves; 0: G.
        norm_eps: of that.
        state_dtype: of the recurrent state; "": the model's.
        shard: the heads, and where there are several the groups, are these of more; None: they are all.
        shares_group: there is a single group, which all ranks have.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    limits: tuple[float, float] = (0.0, LONGEST_STEP)
    norm: str = "gate first"
    norm_groups: int = 0
    norm_eps: float = 1e-5
    state_dtype: str = ""
    shard: EvenShard | None = None
    shares_group: bool = False

    def sharded(self, group: Group) -> Mamba2Spec:
        """What this rank of ``group`` has of it; all where heads, groups or what is normalised together cannot be dealt out
        evenly. A single group is every rank's."""
        size = group.size
        normalised = (self.norm_groups or self.num_groups) if self.norm else size
        if self.num_heads % size or normalised % size or (self.num_groups > 1 and self.num_groups % size):
            return self
        groups = max(self.num_groups // size, 1)
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_groups=groups,
            norm_groups=self.norm_groups // size,
            shard=EvenShard(group),
            shares_group=self.num_groups == 1,
        )

    @property
    def inner(self) -> int:
        """D = H P."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: x, b and c."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> CacheSpec:
        inputs = head_inputs(self.num_heads, self.head_dim, self.num_groups, self.state_size)
        shape = self.num_heads, self.head_dim, self.state_size
        matrices = recurrent(*shape, dtype=self.state_dtype, inputs=inputs)
        return state_of(window(self.convolved, self.taps), matrices)

    def make(self, site: Site) -> Mixer:
        return Mamba2(self, site.hidden, dtype=site.dtype, device=site.device)


class Mamba2(StateMixer):
    """The state space of ``spec``."""

    def __init__(self, spec: Mamba2Spec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        rows = {"in_proj": spec.inner + spec.convolved + spec.num_heads}
        self.into = Linear(hidden, rows, bias=spec.bias, dtype=dtype, device=device)
        self.conv = Convolution(spec.convolved, spec.taps, bias=spec.conv_bias, dtype=dtype, device=device)
        shard, inner = spec.shard, spec.inner
        self.out = product_out(inner, "out_proj", hidden, shard, bias=spec.out_bias, dtype=dtype, device=device)
        if shard is not None:
            self.into.taken = {"in_proj": self._sections(shard, inner, behind=spec.num_heads)}
        wide = partial(parameter, dtype=torch.float32, device=device)
        self.a, self.d, self.dt_bias = (wide(spec.num_heads) for _ in range(3))
        self.norm = parameter(spec.inner, dtype=dtype, device=device) if spec.norm else None

    def _sections(self, shard: EvenShard, *gate: int, behind: int = 0) -> Taken:
        """Rows of what has the gate, x, b, c, and the time steps, one behind the other."""
        spec = self.spec
        groups = spec.num_groups * spec.state_size
        if not spec.shares_group:
            return shard.rows(*gate, spec.inner, groups, groups, *([behind] if behind else []))
        first, size = shard.rows(*gate, spec.inner, whole=2 * groups)
        if not behind:
            return first, size
        last, more = shard.rows(behind)
        return torch.cat([first, size + last]), size + more

    def mix(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """[T, D + convolved + H] -> [T, D]."""
        spec = self.spec
        gate, inputs, dt = x.split((spec.inner, spec.convolved, spec.num_heads), dim=1)
        weight, bias = self.conv.weight, self.conv.bias
        y = scan_convolved_heads(
            inputs, weight, bias, dt, self.dt_bias, self.a, self.d, batch, cache, spec.limits
        ).flatten(1)
        if self.norm is None:
            return silu_mul(torch.cat([gate, y], dim=1))
        group = spec.inner // (spec.norm_groups or spec.num_groups)
        return gated_rms_norm(y, gate, self.norm, spec.norm_eps, group, spec.norm == "gate first", False)

    def finalize(self) -> None:
        """The checkpoint has log(-a)."""
        self.a.copy_(-self.a.exp())

    def destinations(self, prefix: str) -> dict[str, Target]:
        return self.own_destinations(prefix) | self.into.destinations(prefix) | self.out.destinations(prefix)

    def own_destinations(self, prefix: str) -> dict[str, Target]:
        """``destinations`` without those of the products in and out."""
        named = {"A_log": self.a, "D": self.d, "dt_bias": self.dt_bias}
        if self.norm is not None:
            named["norm.weight"] = self.norm
        shard, own = self.spec.shard, dict[str, Target]()
        for name, tensor in named.items():
            own[f"{prefix}{name}"] = Target.part(tensor, None if shard is None else shard.rows(len(tensor)))
        return own | self.conv.destinations(f"{prefix}conv1d.", None if shard is None else self._sections(shard))
