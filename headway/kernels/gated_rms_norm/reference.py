"""What ``gated_rms_norm`` means, in torch; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool, sigmoid: bool
) -> torch.Tensor:
    wide, opened = x.float(), torch.sigmoid(gate.float()) if sigmoid else F.silu(gate.float())
    if gate_first:
        wide = wide * opened
    grouped = wide.unflatten(-1, (-1, group))
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    y = (normed * weight.view(-1, group)).flatten(-2)
    return (y if gate_first else y * opened).to(x.dtype)
