"""The meaning of the wide products; shapes in the package docstring."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.rope_kv_write.reference import rope_kv_write
from headway.kernels.silu_mul.reference import silu_mul
from headway.kernels.wide_linear.tiles import WIDE


def _product(x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float) -> torch.Tensor:
    if squares is None:
        return F.linear(x, weight)
    scale = torch.rsqrt(squares.sum(1) / x.shape[1] + eps)
    return (F.linear(x.float(), weight.float()) * scale[:, None]).to(x.dtype)


def wide_gate_up(x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float) -> torch.Tensor:
    return silu_mul(_product(x, weight, squares, eps))


def wide_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    residual += F.linear(x, weight)
    squares = [columns.float().square().sum(1) for columns in residual.split(WIDE, dim=1)]
    return residual * norm, torch.stack(squares, dim=1)


def wide_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor | None,
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
    qkv = _product(x, weight, squares, eps)
    return rope_kv_write(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads)
