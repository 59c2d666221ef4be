"""The meaning of ``silu_mul``, ``gelu_mul``, ``sigmoid_mul`` and ``gelu``; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).to(x.dtype) * up


def gelu_mul(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none") * up


def gate_mul(x: torch.Tensor, act: str) -> torch.Tensor:
    return silu_mul(x) if act == "silu" else gelu_mul(x, act == "gelu_tanh")


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)
