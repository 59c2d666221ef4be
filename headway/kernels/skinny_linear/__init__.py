"""Linear layers for few rows, with what stands before and after them in a decoder layer fused in.

A decode step reads every weight for a handful of tokens: time is bytes of weight over bandwidth, plus what each launch
costs. These four are one kernel with options; each streams the weight once, and none needs scratch memory.

    x         [T, K] activations (bf16, f16, f32), last dimension contiguous, T small
    weight    [N, K] contiguous, x's dtype;   bias [N] or None;   norm [K], the weight of an RMS norm

skinny_linear(x, weight, bias) -> y [T, N]                  x W^T + b
norm_linear(x, norm, eps, weight, bias) -> y [T, N]         skinny_linear(rms_norm(x, norm, eps), ...)
norm_gate_up(x, norm, eps, weight, bias, act) -> y [T, N / 2]   act(gate) * up of norm_linear(...), act one of ``GATES`` and
                                                            weight = (gate rows, up rows); norm None: of skinny_linear(...)
linear_add(x, weight, bias, residual, factor=1) -> ()       residual [T, N] += factor * skinny_linear(x, ...), in place

Rounding is that of the separate ops: the norm's result, the product, gate, silu and up are rounded to the dtype where the
separate kernels would store them. Sums are in float32, in an order that depends on T's power-of-two bucket and the
tile, never on other rows' values; results differ from the separate ops by that order alone.
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.skinny_linear import reference


def _empty(x: torch.Tensor, outputs: int) -> torch.Tensor:
    return torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)


def _skinny_linear_meta(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return _empty(x, weight.shape[0])


def _norm_linear_meta(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, *_: object
) -> torch.Tensor:
    return _empty(x, weight.shape[0])


def _norm_gate_up_meta(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, weight: torch.Tensor, *_: object
) -> torch.Tensor:
    return _empty(x, weight.shape[0] // 2)


skinny_linear = Op(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.skinny_linear,
    meta=_skinny_linear_meta,
    triton="headway.kernels.skinny_linear.triton:skinny_linear",
)
norm_linear = Op(
    "norm_linear(Tensor x, Tensor norm, float eps, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.norm_linear,
    meta=_norm_linear_meta,
    triton="headway.kernels.skinny_linear.triton:norm_linear",
)
norm_gate_up = Op(
    "norm_gate_up(Tensor x, Tensor? norm, float eps, Tensor weight, Tensor? bias, str act='silu') -> Tensor",
    reference=reference.norm_gate_up,
    meta=_norm_gate_up_meta,
    triton="headway.kernels.skinny_linear.triton:norm_gate_up",
)
linear_add = Op(
    "linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) residual, float factor=1.0) -> ()",
    reference=reference.linear_add,
    triton="headway.kernels.skinny_linear.triton:linear_add",
)
