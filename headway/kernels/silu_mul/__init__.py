"""Activations: silu(gate) * up of Llama-like MLPs, gelu(gate) * up of Gemma-like ones, sigmoid(gate) * x, BERT's GELU.

silu_mul(x) -> y
    x  [T, 2 * I] activations (bf16, f16, f32), row = (gate [I], up [I]), last dimension contiguous
    y  [T, I] in x's dtype:  round(gate * sigmoid(gate)) * up, the sigmoid in f32

gelu_mul(x, tanh) -> y: round(gate * Phi(gate)) * up; with tanh Phi(g) is (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2

gate_mul(gate, up, act) -> y: the same of two tensors [T, I], last dimensions contiguous; act is one of ``GATES``

sigmoid_mul(x, gate) -> y: what attention gates its results with
    x, gate  [T, I] activations, last dimension contiguous
    y        [T, I] in x's dtype:  x * round(sigmoid(gate))

gelu(x) -> y: x * Phi(x), Phi of the normal distribution (Hendrycks and Gimpel 2016)
    x  [..., I] activations, last dimension contiguous, the others as if they were one
    y  [..., I] in x's dtype, contiguous
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op, like_first
from headway.kernels.silu_mul import reference


def _silu_mul_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)


silu_mul = Op(
    "silu_mul(Tensor x) -> Tensor",
    reference=reference.silu_mul,
    meta=_silu_mul_meta,
    triton="headway.kernels.silu_mul.triton:silu_mul",
    cpu="headway.kernels.cpu.ops:silu_mul",
)

GATES = ("silu", "gelu_tanh", "gelu")
"""Activations of gates that kernels know, by their places here, counted from 1."""

gelu_mul = Op(
    "gelu_mul(Tensor x, bool tanh) -> Tensor",
    reference=reference.gelu_mul,
    meta=lambda x, tanh: _silu_mul_meta(x),
    triton="headway.kernels.silu_mul.triton:gelu_mul",
)

gate_mul = Op(
    "gate_mul(Tensor gate, Tensor up, str act) -> Tensor",
    reference=reference.gate_mul,
    meta=lambda gate, up, act: torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
    triton="headway.kernels.silu_mul.triton:gate_mul",
)

sigmoid_mul = Op(
    "sigmoid_mul(Tensor x, Tensor gate) -> Tensor",
    reference=reference.sigmoid_mul,
    meta=like_first,
    triton="headway.kernels.silu_mul.triton:sigmoid_mul",
)

gelu = Op(
    "gelu(Tensor x) -> Tensor",
    reference=reference.gelu,
    meta=like_first,
    triton="headway.kernels.silu_mul.triton:gelu",
)
