"""The meaning of ``embed``; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embed(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    rows = F.embedding(ids.clamp(0, weight.shape[0] - 1), weight)
    return rows if scale == 1.0 else rows.mul_(scale)
