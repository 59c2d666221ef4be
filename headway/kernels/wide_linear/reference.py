"""The meaning of the wide products; shapes in the package docstring."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from headway.kernels.rope_kv_write.reference import rope_kv_write
from headway.kernels.silu_mul.reference import gate_mul_halves


def wide_gate_up(x: torch.Tensor, weight: torch.Tensor, act: str = "silu") -> torch.Tensor:
    return gate_mul_halves(F.linear(x, weight), act)


def wide_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> None:
    residual += F.linear(x, weight) * factor


def wide_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tanh: bool) -> torch.Tensor:
    y = F.linear(x.float(), weight.float(), bias.float()).to(x.dtype)
    return F.gelu(y.float(), approximate="tanh" if tanh else "none").to(x.dtype)


def wide_qkv(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return rope_kv_write(F.linear(x, weight), *others)
