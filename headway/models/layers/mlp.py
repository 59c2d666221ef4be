"""The feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from headway.kernels.linear import PackedLinear
from headway.kernels.wide_linear import wide_gelu
from headway.kernels.wide_linear.tiles import Counts
from headway.models.interface import Target
from headway.models.layers.activation import activation
from headway.models.layers.forms import Rules
from headway.models.layers.linear import Linear, SummedLinear
from headway.parallel.group import Group
from headway.parallel.shard import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPSpec:
    """A feed-forward block.

    Attributes:
        size: inner width.
        activation: one of ``ACTIVATIONS``' values.
        gated: act(gate(x)) * up(x) (Shazeer 2020); else act(up(x)).
        bias: of all products.
        down_bias: of the one out, where it differs; None: it does not.
        multipliers: of the gate, and of the result; they become part of the weights.
        names: of the products in the checkpoint: those in, and the one out. Gate and up may be one tensor.
        up_first: the checkpoint's one tensor has up before gate.
        shard: ``size`` is this part of the inner width; None: all of it.
    """

    size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None
    multipliers: tuple[float, float] = (1.0, 1.0)
    names: tuple[tuple[str, ...], str] = (("gate_proj", "up_proj"), "down_proj")
    up_first: bool = False
    shard: Part | None = None

    def sharded(self, group: Group) -> MLPSpec:
        """What this rank of ``group`` has of it."""
        part = Part(group, self.size)
        return replace(self, size=len(part.own), shard=part)

    def make(self, hidden: int, *, dtype: torch.dtype, device: torch.device) -> MLP:
        """The module, for hidden states of size ``hidden``."""
        return MLP(self, hidden, dtype=dtype, device=device)


class MLP(nn.Module):
    """down(act(gate_up(x))), gate and up in one matrix. ``blocks`` runs it, by way of junctions.

    Attributes:
        gate_up, down: the products in and out.
        act: what stands between them.
        wide: for which numbers of tokens ``wide_gelu`` is the product in and what follows.
    """

    def __init__(self, spec: MLPSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        names, down = spec.names
        self._size, self._up_first = spec.size, spec.up_first
        rows = spec.size * (2 if spec.gated else 1)
        parts = {name: rows // len(names) for name in names}
        self.gate_up = Linear(hidden, parts, bias=spec.bias, dtype=dtype, device=device)
        down_bias = spec.bias if spec.down_bias is None else spec.down_bias
        if spec.shard is None:
            self.down = Linear(spec.size, {down: hidden}, bias=down_bias, dtype=dtype, device=device)
        else:
            part = spec.shard
            self.gate_up.taken = part.taken(names, 2 if spec.gated else 1)
            self.down = SummedLinear(
                spec.size,
                {down: hidden},
                group=part.group,
                columns=part.columns(),
                bias=down_bias,
                dtype=dtype,
                device=device,
            )
        self.act = activation(spec.activation, gated=spec.gated)
        self.wide: Counts = ()

    def finalize(self) -> None:
        """Called once, after loading and before the products are packed."""
        gate, result = self.spec.multipliers
        if gate != 1.0:
            self.gate_up.multiply_rows({0: (self.spec.size, gate)})
        if result != 1.0:
            self.down.multiply_rows({0: (self.down.weight.shape[0], result)})

    def fuse(self, rules: Rules) -> None:
        """Called once, when products are packed: the activation becomes part of the product before it where that knows it."""
        linear, gelu, dense = self.gate_up, self.spec.activation, self.gate_up.dense
        packed = linear.packed
        if isinstance(packed, PackedLinear) and gelu == "gelu" and not self.spec.gated:
            packed.gelu, self.act = True, _as_it_is
        gelus = gelu in ("gelu", "gelu_tanh") and not self.spec.gated and linear.bias is not None
        if gelus and dense is not None and dense.dtype is torch.bfloat16 and rules.wide is not None:
            self.wide = rules.wide("wide_gelu", *dense.shape)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """act(gate_up(x)), x [T, C] -> [T, I], in the form that suits the number of tokens."""
        linear = self.gate_up
        if any(x.shape[0] in each for each in self.wide):
            y: torch.Tensor = wide_gelu(x, linear.weight, linear.bias, self.spec.activation == "gelu_tanh")
            return y
        return self.act(linear.forward(x))

    def destinations(self, prefix: str) -> dict[str, Target]:
        order = torch.arange(2 * self._size).roll(self._size) if self._up_first else None
        return self.gate_up.destinations(prefix, order) | self.down.destinations(prefix)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x
