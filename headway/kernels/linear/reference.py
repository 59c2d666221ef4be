"""The meaning of ``linear_packed``; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, gelu: bool = False
) -> torch.Tensor:
    y = F.linear(x, unpack(packed, outputs).to(x.dtype), bias)
    return F.gelu(y) if gelu else y


def unpack(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """packed [P, K, 32] -> weight [outputs, K]."""
    panels, inputs, width = packed.shape
    unit = 2 if packed.dtype is torch.bfloat16 else 1
    by_output = packed.view(panels, inputs // unit, width, unit).transpose(1, 2)  # [P, 32, K / unit, unit]
    return by_output.reshape(panels * width, inputs)[:outputs]
