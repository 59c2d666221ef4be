"""A conformer block: half a feed-forward part, attention to what is near, a convolution, another half, and a norm.

Shapes: N rows of one recording, C the tower's width, H heads of D, W keys that a query sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from headway.kernels.rms_norm import norm_add
from headway.models.audio.spec import AudioSpec
from headway.models.interface import Target
from headway.models.layers.activation import activation
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import parameter
from headway.models.layers.norm import RMSNorm
from headway.models.vision.sandwich import ClippedLinear

EPS = 1e-6
"""Of norms that config.json says nothing about."""
LONGEST_PERIOD = 1e4
"""Of the sines that relative positions are made of."""


def limited(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x clamped to +-limit, or to what its dtype holds."""
    most = min(limit, torch.finfo(x.dtype).max)
    return x.clamp(-most, most)


class FeedForward(nn.Module):
    """x += weight * norm(product(act(product(norm(x)))))."""

    def __init__(self, spec: AudioSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size, self.spec = spec.hidden_size, spec
        self.up = _product(spec, size, {"ffw_layer_1": 4 * size}, dtype=dtype, device=device)
        self.down = _product(spec, 4 * size, {"ffw_layer_2": size}, dtype=dtype, device=device)
        self.before, self.behind = (RMSNorm(size, EPS, dtype=dtype, device=device) for _ in range(2))
        self.act = activation(spec.activation, gated=False)

    def forward(self, x: torch.Tensor) -> None:
        """[N, C], overwritten."""
        limit = self.spec.limit
        y = self.down(self.act(self.up(self.before.forward(limited(x, limit)))))
        norm_add(limited(y, limit), self.behind.weight, x, None, EPS, self.spec.residual_weight)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = _of(self.up).destinations(prefix) | _of(self.down).destinations(prefix)
        found |= self.before.destinations(f"{prefix}pre_layer_norm.")
        return found | self.behind.destinations(f"{prefix}post_layer_norm.")


class LocalAttention(nn.Module):
    """x += norm(product(attend(norm(x)))), where each row sees the W rows around it.

    Scores are query x key + query x relative position, with learned scales of a head's numbers, and capped.
    """

    def __init__(self, spec: AudioSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size, self.spec = spec.hidden_size, spec
        into = dict.fromkeys((f"{spec.names.attention}{each}_proj" for each in "qkv"), size)
        self.qkv = _product(spec, size, into, dtype=dtype, device=device)
        self.out = _product(spec, size, {spec.names.post: size}, dtype=dtype, device=device)
        self.before, self.behind = (RMSNorm(size, EPS, dtype=dtype, device=device) for _ in range(2))
        self.position_weight = parameter(size, size, dtype=dtype, device=device)
        self.scales = parameter(spec.head_dim, dtype=dtype, device=device)
        self.relative = torch.empty(spec.num_heads, spec.head_dim, spec.window, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> None:
        """x [N, C], overwritten; ``hidden``: bool [N, 1, W], keys that are before the recording, or behind it."""
        spec, limit = self.spec, self.spec.limit
        qkv = self.qkv(self.before.forward(limited(x, limit))).float().view(len(x), 3, spec.num_heads, spec.head_dim)
        q, k, v = qkv.unbind(1)
        q = q * self.scales
        near = (0, 0, 0, 0, spec.past - 1, spec.future)
        k, v = (F.pad(each, near).unfold(0, spec.window, 1) for each in (k, v))  # [N, H, D, W]
        scores = torch.matmul(q[:, :, None], k)[:, :, 0]
        scores = scores + torch.matmul(q.transpose(0, 1), self.relative).transpose(0, 1)
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        weights = torch.where(hidden, spec.hidden_score, scores).softmax(-1)
        mixed = torch.matmul(v, weights[..., None]).flatten(1).to(x.dtype)
        norm_add(limited(self.out(mixed), limit), self.behind.weight, x, None, EPS)

    def destinations(self, prefix: str) -> dict[str, Target]:
        names = self.spec.names
        found = _of(self.qkv).destinations(prefix) | _of(self.out).destinations(prefix)
        found |= self.before.destinations(prefix + names.norms[0]) | self.behind.destinations(prefix + names.norms[1])
        found[prefix + names.positions] = Target(self.position_weight)
        return found | {f"{prefix}{names.attention}per_dim_scale": Target(self.scales)}

    def finalize(self) -> None:
        """Called once, when the weights are in place: relative positions are projected, scales of queries and keys made one."""
        spec, weight = self.spec, self.position_weight
        found = F.linear(relative_positions(spec).to(weight), weight).view(-1, spec.num_heads, spec.head_dim)
        self.relative.zero_()
        self.relative[..., : len(found)] = found.permute(1, 2, 0) / spec.key_scale
        own = F.softplus(self.scales.data.float())
        self.scales = parameter(spec.head_dim, dtype=torch.float32, device=weight.device)
        self.scales.copy_(own * (spec.key_scale * spec.head_dim**-0.5 / math.log(2)))
        del self.position_weight


class LightConvolution(nn.Module):
    """x += product(act(norm(convolution(gate(product(norm(x))))))), each channel by itself, seeing rows up to its own."""

    def __init__(self, spec: AudioSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size, self.spec = spec.hidden_size, spec
        self.start = _product(spec, size, {"lconv1d.linear_start": 2 * size}, dtype=dtype, device=device)
        self.end = _product(spec, size, {"lconv1d.linear_end": size}, dtype=dtype, device=device)
        self.weight = parameter(size, 1, spec.kernel, dtype=dtype, device=device)
        self.before, self.between = (RMSNorm(size, spec.eps, dtype=dtype, device=device) for _ in range(2))
        self.act = activation(spec.activation, gated=False)

    def forward(self, x: torch.Tensor) -> None:
        """[N, C], overwritten."""
        y = F.glu(self.start(self.before.forward(x)), dim=-1).T[None]
        y = F.conv1d(F.pad(y, (self.spec.kernel - 1, 0)), self.weight, groups=len(self.weight))[0].T.contiguous()
        y = self.between.forward(limited(y, self.spec.limit))
        x += self.end(self.act(y))

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = _of(self.start).destinations(prefix) | _of(self.end).destinations(prefix)
        found |= self.before.destinations(f"{prefix}lconv1d.pre_layer_norm.")
        found |= self.between.destinations(f"{prefix}lconv1d.conv_norm.")
        return found | {f"{prefix}lconv1d.depthwise_conv1d.weight": Target(self.weight)}


class ConformerBlock(nn.Module):
    """See the module."""

    def __init__(self, spec: AudioSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.first, self.second = (FeedForward(spec, dtype=dtype, device=device) for _ in range(2))
        self.attention = LocalAttention(spec, dtype=dtype, device=device)
        self.convolution = LightConvolution(spec, dtype=dtype, device=device)
        self.norm = RMSNorm(spec.hidden_size, EPS, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> None:
        """x [N, C], overwritten; ``hidden``: see ``LocalAttention``."""
        self.first(x)
        self.attention(x, hidden)
        self.convolution(x)
        self.second(x)
        x.copy_(self.norm.forward(limited(x, self.spec.limit)))

    def destinations(self, prefix: str) -> dict[str, Target]:
        names = self.spec.names
        found = self.first.destinations(prefix + names.parts[0]) | self.second.destinations(prefix + names.parts[1])
        found |= self.attention.destinations(prefix) | self.convolution.destinations(prefix)
        return found | self.norm.destinations(prefix + names.norms[2])

    def finalize(self) -> None:
        """Called once, when the weights are in place and before the products are packed."""
        self.attention.finalize()


def relative_positions(spec: AudioSpec) -> torch.Tensor:
    """f32 [keys that have one, C]: sines and cosines of the keys' relative positions (Dai et al. 2019, appendix B)."""
    places = spec.span - 1 - torch.arange(spec.placed)
    half = spec.hidden_size // 2
    rates = torch.exp(torch.arange(half) * (-math.log(LONGEST_PERIOD) / max(half - 1, 1)))
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _product(
    spec: AudioSpec, width: int, parts: Mapping[str, int], *, dtype: torch.dtype, device: torch.device
) -> Linear | ClippedLinear:
    if spec.clipped:
        return ClippedLinear(width, parts, dtype=dtype, device=device)
    own = {f"{name}{spec.names.linear}": rows for name, rows in parts.items()}
    return Linear(width, own, bias=False, dtype=dtype, device=device)


def _of(product: nn.Module) -> Linear | ClippedLinear:
    return cast("Linear | ClippedLinear", product)
