"""Linear layers for 3 to 256 rows on Hopper, launched early.

At these sizes a product's floor is still the bytes of its weight, and the norm of its rows is no longer small enough for
every program to compute anew. These start early instead: weights are in shared memory before the activations come.

    x         [T, K] activations (bf16, f16), T <= 256, rows begin at multiples of 32 bytes
    weight    [N, K] contiguous, x's dtype, K a multiple of 64;   bias [N] or None

mid_linear(x, weight, bias, squares, eps) -> y [T, N]          x W^T + b
mid_gate_up(x, weight, bias, squares, eps, act) -> y [T, N / 2]   act(gate) * up of mid_linear(x, ...), act one of ``GATES``,
                                                               weight = (gate rows, up rows)
mid_add(x, weight, bias, residual, norm, factor=1) -> (y, squares)   residual [T, N] += factor * mid_linear(x, ...), in place;
                                                               y [T, N] = residual * norm, norm [N]
linear_parts(x, weight, bias) -> p [S, T, N]     f32; their sum over S is x W^T + b. S, the number of parts of K that were
                                                 summed apart, follows from the shape

``squares`` f32 [P, T]: sums of residual^2 over the columns of each of P programs; P follows from the shape. An RMS norm between
two layers is y of the first with the second's rows divided by the root of their mean square: what comes with squares is
rsqrt(sum of squares over P / K + eps) * (x W^T) + b; without, x is used as it is. So y is not normalised and needs the range of
bf16: in f16, ``linear_parts`` and ``add_parts_rms_norm``, which takes the parts, are for the same place.

Rounding is that of the separate ops, except that y is rounded once where a norm rounds twice. Sums are in float32, in an order
that depends on the tile alone, never on other rows' values.
"""

from __future__ import annotations

import torch

from headway.kernels.mid_linear import reference
from headway.kernels.mid_linear.tiles import tile_for
from headway.kernels.registry import Op


def _mid_linear_meta(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


def _mid_gate_up_meta(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)


def _mid_add_meta(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    programs = tile_for("mid_add", x.shape[0], *weight.shape).programs(weight.shape[0])
    squares = torch.empty((programs, x.shape[0]), dtype=torch.float32, device=x.device)
    return torch.empty(residual.shape, dtype=residual.dtype, device=residual.device), squares


def _linear_parts_meta(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    splits = tile_for("linear_parts", x.shape[0], *weight.shape).splits
    return torch.empty((splits, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)


mid_linear = Op(
    "mid_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? squares, float eps) -> Tensor",
    reference=reference.mid_linear,
    meta=_mid_linear_meta,
    triton="headway.kernels.mid_linear.hopper.launch:mid_linear",
)
mid_gate_up = Op(
    "mid_gate_up(Tensor x, Tensor weight, Tensor? bias, Tensor? squares, float eps, str act='silu') -> Tensor",
    reference=reference.mid_gate_up,
    meta=_mid_gate_up_meta,
    triton="headway.kernels.mid_linear.hopper.launch:mid_gate_up",
)
mid_add = Op(
    "mid_add(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) residual, Tensor norm, float factor=1.0) -> (Tensor, Tensor)",
    reference=reference.mid_add,
    meta=_mid_add_meta,
    triton="headway.kernels.mid_linear.hopper.launch:mid_add",
)
linear_parts = Op(
    "linear_parts(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.linear_parts,
    meta=_linear_parts_meta,
    triton="headway.kernels.mid_linear.hopper.launch:linear_parts",
)
