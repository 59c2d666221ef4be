"""Normalisation of hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from headway.kernels.add_layer_norm import add_layer_norm
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.models.interface import Target


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of a model.

    Attributes:
        eps: added to the mean square, or to the variance.
        kind: "rms", or "layer" (with a mean, Ba et al. 2016).
        bias: of layer norms.
        plus_one: the checkpoint holds the weight minus 1 (Gemma). It is then kept in float32, where 1 + w is exact enough.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    plus_one: bool = False

    def make(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Norm:
        """A norm over ``size`` elements."""
        if self.kind == "layer":
            return LayerNorm(size, self.eps, bias=self.bias, dtype=dtype, device=device)
        return RMSNorm(size, self.eps, dtype=dtype, device=device, plus_one=self.plus_one)


class Norm(Protocol):
    """What junctions and models ask of a norm."""

    eps: float
    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C], fresh."""

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """residual += factor * x in place; returns the norm of the new residual. Both [T, C]."""

    def destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with prefix -> where it goes."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019), normalised in float32.

    Attributes:
        weight: [C], in the model's dtype, or in float32 with ``plus_one``.
    """

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, plus_one: bool = False
    ) -> None:
        super().__init__()
        self.eps, self._plus_one = eps, plus_one
        kept = torch.float32 if plus_one else dtype
        self.weight = nn.Parameter(torch.empty(size, dtype=kept, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return cast(torch.Tensor, rms_norm(x, self.weight, self.eps))

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """residual += factor * x in place; returns the norm of the new residual. Both [T, C]."""
        return cast(torch.Tensor, add_rms_norm(x, residual, self.weight, self.eps, factor))

    def destinations(self, prefix: str) -> dict[str, Target]:
        return {f"{prefix}weight": Target(self.weight)}

    def finalize(self) -> None:
        """Called once, after loading."""
        if self._plus_one:
            self.weight.add_(1.0)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016), in float32 throughout.

    Attributes:
        weight: [C].
        bias: [C] or None.
    """

    def __init__(self, size: int, eps: float, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        empty = torch.empty(size, dtype=dtype, device=device) if bias else None
        self.bias = nn.Parameter(empty, requires_grad=False) if empty is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """residual += factor * x in place; returns the norm of the new residual. Both [T, C]."""
        x = x if factor == 1.0 else x * factor
        return cast(torch.Tensor, add_layer_norm(x, residual, self.weight, self.bias, self.eps))

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = {f"{prefix}weight": Target(self.weight)}
        return found if self.bias is None else found | {f"{prefix}bias": Target(self.bias)}
