"""The meaning of the linear layers for 3 to 256 rows; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.mid_linear.tiles import tile_for
from headway.kernels.silu_mul.reference import gate_mul_halves


def mid_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, squares: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if squares is None:
        return F.linear(x, weight, bias)
    scale = torch.rsqrt(squares.sum(0) / x.shape[1] + eps)
    y = F.linear(x.float(), weight.float()) * scale[:, None]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def mid_gate_up(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, squares: torch.Tensor | None, eps: float,
    act: str = "silu",
) -> torch.Tensor:  # fmt: skip
    return gate_mul_halves(mid_linear(x, weight, bias, squares, eps), act)


def mid_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Sums of squares over as many columns as the kernel's programs have."""
    residual.add_(F.linear(x, weight, bias) * factor)
    tile = tile_for("mid_add", x.shape[0], *weight.shape)
    sums = [columns.float().square().sum(1) for columns in residual.split(tile.wide, dim=1)]
    return residual * norm, torch.stack(sums)


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Parts of K as the kernel has them."""
    splits = tile_for("linear_parts", x.shape[0], *weight.shape).splits
    wide, weights = x.float().chunk(splits, dim=1), weight.float().chunk(splits, dim=1)
    parts = torch.stack([F.linear(a, b) for a, b in zip(wide, weights, strict=True)])
    if bias is not None:
        parts[0] += bias.float()
    return parts
