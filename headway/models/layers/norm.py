"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from headway.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019), normalised in float32.

    Attributes:
        weight: [C].
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return cast(torch.Tensor, rms_norm(x, self.weight, self.eps))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x in place; returns the norm of the new residual. Both [T, C]."""
        return cast(torch.Tensor, add_rms_norm(x, residual, self.weight, self.eps))

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name, beginning with prefix -> the view of ours it fills."""
        return {f"{prefix}weight": self.weight}
