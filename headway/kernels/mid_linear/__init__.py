"""Linear layers for 3 to 256 rows on Hopper, launched early.

At these sizes a product's floor is still the bytes of its weight, and the norm of its rows is no longer small enough for
every program to compute anew. So norms stay kernels of their own, and these three start early instead: weights are in
shared memory before the activations come.

    x         [T, K] activations (bf16, f16), T <= 256, rows begin at multiples of 32 bytes
    weight    [N, K] contiguous, x's dtype, K a multiple of 64;   bias [N] or None

mid_linear(x, weight, bias) -> y [T, N]          x W^T + b
mid_gate_up(x, weight, bias) -> y [T, N / 2]     silu_mul(mid_linear(x, ...)), weight = (gate rows, up rows)
linear_parts(x, weight, bias) -> p [S, T, N]     f32; their sum over S is x W^T + b. S, the number of parts of K that were
                                                 summed apart, follows from the shape

``add_parts_rms_norm`` takes the parts. Rounding is that of the separate ops, once the parts are summed. Sums are in float32,
in an order that depends on the tile alone, never on other rows' values.
"""

from __future__ import annotations

import torch

from headway.kernels.mid_linear import reference
from headway.kernels.mid_linear.tiles import tile_for
from headway.kernels.registry import Op


def _mid_linear_meta(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


def _mid_gate_up_meta(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)


def _linear_parts_meta(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    splits = tile_for("linear_parts", x.shape[0], *weight.shape).splits
    return torch.empty((splits, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)


mid_linear = Op(
    "mid_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.mid_linear,
    meta=_mid_linear_meta,
    triton="headway.kernels.mid_linear.launch:mid_linear",
)
mid_gate_up = Op(
    "mid_gate_up(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.mid_gate_up,
    meta=_mid_gate_up_meta,
    triton="headway.kernels.mid_linear.launch:mid_gate_up",
)
linear_parts = Op(
    "linear_parts(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.linear_parts,
    meta=_linear_parts_meta,
    triton="headway.kernels.mid_linear.launch:linear_parts",
)
