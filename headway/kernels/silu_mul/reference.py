"""The meaning of ``silu_mul``, ``gelu_mul``, ``gate_mul``, ``sigmoid_mul`` and ``gelu``; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    return gate_mul_halves(x, "silu")


def gelu_mul(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    return gate_mul_halves(x, "gelu_tanh" if tanh else "gelu")


def gate_mul_halves(x: torch.Tensor, act: str) -> torch.Tensor:
    """``gate_mul`` of x [..., 2 * I] = (gate, up)."""
    gate, up = x.chunk(2, dim=-1)
    return gate_mul(gate, up, act)


def gate_mul(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    if act == "silu":
        return F.silu(gate.float()).to(gate.dtype) * up
    return F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none") * up


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)
