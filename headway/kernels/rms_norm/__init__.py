"""RMS normalisation, alone and fused with the residual addition (Zhang and Sennrich 2019, rounding as in HF Llama).

rms_norm(x, weight, eps) -> y
    x       [T, C] activations (bf16, f16, f32), last dimension contiguous
    weight  [C]
    y       [T, C] in x's dtype:  round(x / sqrt(mean(x^2) + eps)) * weight, statistics in f32

add_rms_norm(x, residual, weight, eps, factor=1) -> y
    residual [T, C] in x's dtype, updated in place:  residual += factor * x (each rounded to the dtype);  y = rms_norm(residual)

add_parts_rms_norm(parts, residual, weight, eps, factor=1) -> y
    parts   f32 [S, T, C] contiguous, a product summed in S parts: add_rms_norm of their sum, rounded to residual's dtype

norm_add(x, after, residual, weight, eps, factor=1, scale=None) -> y: where a norm stands behind a product x, or its parts
[S, T, C], too
    after   [C]: residual += factor * rms_norm(x, after);  y = rms_norm(residual, weight), or empty [0, C] with weight None
    scale   [1] in x's dtype: the sum, rounded, is multiplied by it, before the norm; None: it is not
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op, like_first
from headway.kernels.rms_norm import reference


def _add_parts_rms_norm_meta(parts: torch.Tensor, residual: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)


rms_norm = Op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=reference.rms_norm,
    meta=like_first,
    triton="headway.kernels.rms_norm.triton:rms_norm",
    cpu="headway.kernels.cpu.ops:rms_norm",
)
add_rms_norm = Op(
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, float factor=1.0) -> Tensor",
    reference=reference.add_rms_norm,
    meta=like_first,
    triton="headway.kernels.rms_norm.triton:add_rms_norm",
    cpu="headway.kernels.cpu.ops:add_rms_norm",
)
add_parts_rms_norm = Op(
    "add_parts_rms_norm(Tensor parts, Tensor(a!) residual, Tensor weight, float eps, float factor=1.0) -> Tensor",
    reference=reference.add_parts_rms_norm,
    meta=_add_parts_rms_norm_meta,
    triton="headway.kernels.rms_norm.triton:add_parts_rms_norm",
)
norm_add = Op(
    "norm_add(Tensor x, Tensor after, Tensor(a!) residual, Tensor? weight, float eps, float factor=1.0, Tensor? scale=None) "
    "-> Tensor",
    reference=reference.norm_add,
    meta=lambda x, after, residual, weight, eps, factor=1.0, scale=None: residual.new_empty(
        residual[: 0 if weight is None else None].shape
    ),
    triton="headway.kernels.rms_norm.triton:norm_add",
    cpu="headway.kernels.cpu.ops:norm_add",
)
