"""The meaning of ``rms_norm`` and the forms that add; shapes in the package docstring."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float = 1.0
) -> torch.Tensor:
    residual.add_(x * factor)
    return rms_norm(residual, weight, eps)


def add_parts_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float = 1.0
) -> torch.Tensor:
    return add_rms_norm(parts.sum(0).to(residual.dtype), residual, weight, eps, factor)


def norm_add(
    x: torch.Tensor, after: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, factor: float = 1.0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    residual.add_(rms_norm(x.sum(0).to(residual.dtype) if x.dim() == 3 else x, after, eps) * factor)
    if scale is not None:
        residual.mul_(scale)
    return residual.new_empty((0, residual.shape[1])) if weight is None else rms_norm(residual, weight, eps)
