"""The meaning of the linear layers for 3 to 256 rows; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.mid_linear.tiles import tile_for
from headway.kernels.silu_mul.reference import silu_mul


def mid_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def mid_gate_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return silu_mul(F.linear(x, weight, bias))


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Parts of K as the kernel has them."""
    splits = tile_for("linear_parts", x.shape[0], *weight.shape).splits
    wide, weights = x.float().chunk(splits, dim=1), weight.float().chunk(splits, dim=1)
    parts = torch.stack([F.linear(a, b) for a, b in zip(wide, weights, strict=True)])
    if bias is not None:
        parts[0] += bias.float()
    return parts
