"""The meaning of the wide products; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.rope_kv_write.reference import rope_kv_write
from headway.kernels.silu_mul.reference import gate_mul_halves


def wide_gate_up(x: torch.Tensor, weight: torch.Tensor, act: str = "silu") -> torch.Tensor:
    return gate_mul_halves(F.linear(x, weight), act)


def wide_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> None:
    residual += F.linear(x, weight) * factor


def wide_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tanh: bool) -> torch.Tensor:
    y = F.linear(x.float(), weight.float(), bias.float())
    return F.gelu(y, approximate="tanh" if tanh else "none").to(x.dtype)


def wide_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    qkv = F.linear(x, weight)
    return rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads)
