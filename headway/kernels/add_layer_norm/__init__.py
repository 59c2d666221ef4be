"""A residual and its layer norm: residual += x, y = (residual - mean) / sqrt(variance + eps) * weight + bias.

add_layer_norm(x, residual, weight, bias, eps) -> y
    x, residual  [T, C]; residual is changed in place, and rounded to its dtype before the norm
    weight, bias [C] in their dtype; bias may be None
    y            [T, C], fresh

Mean and variance are of each row, in float32 (Ba et al. 2016).
"""

from __future__ import annotations

import torch

from headway.kernels.add_layer_norm import reference
from headway.kernels.registry import Op


def _meta(x: torch.Tensor, residual: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(residual)


add_layer_norm = Op(
    "add_layer_norm(Tensor x, Tensor(a!) residual, Tensor weight, Tensor? bias, float eps) -> Tensor",
    reference=reference.add_layer_norm,
    meta=_meta,
    triton="headway.kernels.add_layer_norm.triton:add_layer_norm",
    cpu="headway.kernels.cpu.encoder_ops:add_layer_norm",
)
