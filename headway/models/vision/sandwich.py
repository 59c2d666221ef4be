"""Blocks with norms around both parts and norms of heads (Gemma 4), and products whose ranges are clamped.

Shapes: N patches, C the tower's width, H heads of D.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from headway.kernels.dense_attention import dense_attention
from headway.kernels.dense_rope import dense_rope
from headway.kernels.rms_norm import norm_add, rms_norm
from headway.models.interface import Target
from headway.models.layers.activation import activation
from headway.models.layers.linear import Linear
from headway.models.layers.norm import RMSNorm
from headway.models.vision.spec import VisionSpec

_RANGE = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(nn.Module):
    """Products of the same input; each clamps it, and its own result, to a range that the checkpoint has.

    Args:
        parts: name in the checkpoint -> output rows, as ``Linear`` has them.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._parts = [
            Linear(in_features, {f"{name}.linear": rows}, bias=False, dtype=dtype, device=device)
            for name, rows in parts.items()
        ]
        self.parts, self._names = nn.ModuleList(self._parts), tuple(parts)
        self.ranges = torch.empty(len(parts), len(_RANGE), dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, K] -> [N, sum of rows]."""
        found = []
        for part, ends in zip(self._parts, self.ranges.unbind(), strict=True):
            least, most, least_out, most_out = ends.unbind()
            found.append(part.forward(x.clamp(least, most)).clamp_(least_out, most_out))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def destinations(self, prefix: str, order: torch.Tensor | None = None) -> dict[str, Target]:
        """See ``Linear.destinations``."""
        found: dict[str, Target] = {}
        rows = [sum(part.parts.values()) for part in self._parts]
        orders: list[torch.Tensor | None] = [None] * len(rows)
        if order is not None:
            orders = [own - i * rows[0] for i, own in enumerate(order.split(rows))]
        for name, part, own, ends in zip(self._names, self._parts, orders, self.ranges.unbind(), strict=True):
            found |= part.destinations(prefix, own)
            found |= {f"{prefix}{name}.{each}": Target(ends[i]) for i, each in enumerate(_RANGE)}
        return found


def clippable(
    clipped: bool, width: int, parts: Mapping[str, int], *, dtype: torch.dtype, device: torch.device
) -> Linear | ClippedLinear:
    """Products of ``width`` numbers, as ``ClippedLinear`` has them, with ranges or without."""
    if clipped:
        return ClippedLinear(width, parts, dtype=dtype, device=device)
    own = {f"{name}.linear": rows for name, rows in parts.items()}
    return Linear(width, own, bias=False, dtype=dtype, device=device)


class SandwichBlock(nn.Module):
    """x += norm(attend(norm(x))); x += norm(ffn(norm(x))). Queries, keys and values are normalised by heads, values without a
    weight; scores are not scaled."""

    def __init__(self, spec: VisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, names, mlp = spec.hidden_size, spec.names, spec.mlp
        self.spec = spec

        def product(width: int, parts: Mapping[str, int]) -> Linear | ClippedLinear:
            return clippable(spec.clipped, width, parts, dtype=dtype, device=device)

        into, out = names.attention
        gates, down = mlp.names
        self.qkv = product(hidden, dict.fromkeys(into, hidden))
        self.out = product(hidden, {out: hidden})
        self.gate_up = product(hidden, dict.fromkeys((f"{names.ffn}{gate}" for gate in gates), mlp.size))
        self.down = product(mlp.size, {f"{names.ffn}{down}": hidden})
        self.act = activation(mlp.activation, gated=True)
        sizes = (hidden,) * 4 + (spec.head_dim,) * 2
        self._norms = [RMSNorm(size, spec.norm.eps, dtype=dtype, device=device) for size in sizes]
        self.norms = nn.ModuleList(self._norms)
        self.ones = torch.ones(spec.head_dim, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, starts: torch.Tensor, longest: int, positions: torch.Tensor, table: torch.Tensor | None
    ) -> None:
        """See ``VisionBlock``."""
        assert table is not None
        hidden, heads, size, eps = self.spec.hidden_size, self.spec.num_heads, self.spec.head_dim, self.spec.norm.eps
        into_attention, behind_attention, into_ffn, behind_ffn, q_norm, k_norm = self._norms
        qkv = self.qkv.forward(into_attention.forward(x))
        v = qkv[:, 2 * hidden :]
        v.copy_(cast(torch.Tensor, rms_norm(v.reshape(-1, size), self.ones, eps)).view(len(v), -1))
        dense_rope(qkv, positions, table, q_norm.weight, k_norm.weight, eps, heads, heads)
        mixed = dense_attention(qkv, starts, None, heads, heads, 1.0, -1, 0.0, longest)
        normed = norm_add(self.out.forward(mixed), behind_attention.weight, x, into_ffn.weight, eps)
        norm_add(self.down.forward(self.act(self.gate_up.forward(normed))), behind_ffn.weight, x, None, eps)

    def destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes.

        Halves of a head rotate by themselves there; here rows and columns rotate the two halves of one head, so numbers of
        queries and keys change places: (axis, half of its pairs) -> (half, axis), rows first.
        """
        spec, names = self.spec, self.spec.names
        size, hidden = spec.head_dim, spec.hidden_size
        own = torch.arange(size).view(2, 2, -1).flip(0).transpose(0, 1).flatten()
        rows = (torch.arange(2 * spec.num_heads)[:, None] * size + own).flatten()
        order = torch.cat([rows, torch.arange(2 * hidden, 3 * hidden)])
        found = self.qkv.destinations(prefix, order) | self.out.destinations(prefix)
        found |= self.gate_up.destinations(prefix) | self.down.destinations(prefix)
        assert names.behind is not None
        before, behind = names.norms, names.behind
        for name, norm in zip((before[0], behind[0], before[1], behind[1]), self._norms[:4], strict=True):
            found |= norm.destinations(f"{prefix}{name}.")
        for name, norm in zip(names.heads, self._norms[4:], strict=True):
            found[f"{prefix}{name}.weight"] = Target(norm.weight, own)
        return found
