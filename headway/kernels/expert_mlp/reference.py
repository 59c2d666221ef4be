"""What ``expert_mlp`` means, in torch: every expert computes every token, and what is not wanted is dropped."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from headway.kernels.expert_mlp.packing import codes_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floats; bit 3 is the sign."""


def expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    gate_up_scales: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    down_scales: torch.Tensor | None,
    act: str,
    gated: bool,
    limit: float,
    alpha: float,
    weigh_inputs: bool,
) -> torch.Tensor:
    found = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)  # [T, K, C]
    for expert in range(gate_up.shape[0]):
        first = matrix(gate_up, gate_up_scales, expert, x.dtype)
        second = matrix(down, down_scales, expert, x.dtype)
        own = ids == expert
        inputs = x
        if weigh_inputs:
            weight = torch.where(own, weights, 0.0).sum(1, keepdim=True)  # an expert occurs once in a row
            inputs = (x * weight).to(x.dtype)
        inner = activate(product(inputs, first, row(gate_up_bias, expert)), act, gated, limit, alpha).to(x.dtype)
        result = product(inner, second, row(down_bias, expert))
        found = torch.where(own[..., None], result[:, None], found)
    if not weigh_inputs:
        chosen = (ids >= 0) & (ids < gate_up.shape[0])
        found = torch.where(chosen[..., None], found * weights[..., None], 0.0)
    return in_order(found).to(x.dtype)


def add_experts(*given: Any) -> None:
    *experts, residual = given
    residual += expert_mlp(*experts)


def in_order(found: torch.Tensor) -> torch.Tensor:
    """[T, K, C] -> [T, C], the sum over K from the first to the last."""
    total = found[:, 0]
    for k in range(1, found.shape[1]):
        total = total + found[:, k]
    return total


def row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    """An expert's bias, in f32."""
    return None if bias is None else bias[expert].float()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """f32 [T, N]."""
    return F.linear(x.float(), weight.float(), bias)


def activate(x: torch.Tensor, act: str, gated: bool, limit: float, alpha: float) -> torch.Tensor:
    """f32 [T, N] -> f32 [T, I]."""
    gate, up = x.chunk(2, dim=1) if gated else (x, torch.ones(1, device=x.device))
    if act == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1.0)
    if act == "silu":
        return F.silu(gate) * up
    if act == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if act == "gelu":
        return F.gelu(gate) * up
    return (F.relu(gate) if act == "relu" else F.relu(gate).square()) * up


def matrix(weight: torch.Tensor, scales: torch.Tensor | None, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """An expert's [N, K], in ``dtype`` where it is in MXFP4: its values are exact there but where they leave its range."""
    return weight[expert] if scales is None else unpacked(weight[expert], scales[expert]).to(dtype)


def unpacked(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] and [..., K / 32] -> f32 [..., K]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    values = table[codes_of(packed).long()].unflatten(-1, (-1, 32))
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)
