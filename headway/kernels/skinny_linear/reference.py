"""The meaning of the fused linear layers: compositions of the separate ops; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.rms_norm.reference import rms_norm
from headway.kernels.silu_mul.reference import gate_mul_halves


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def norm_linear(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def norm_gate_up(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None, act: str = "silu"
) -> torch.Tensor:  # fmt: skip
    y = F.linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
    return gate_mul_halves(y, act)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, factor: float = 1.0
) -> None:
    residual.add_(F.linear(x, weight, bias) * factor)
