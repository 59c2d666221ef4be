"""``expert_mlp`` on CPUs: each expert computes the tokens that go to it, and no expert that has none is read."""

from __future__ import annotations

import torch

from headway.kernels.expert_mlp.reference import activate, in_order, matrix, product, row
from headway.kernels.state_parts import available

__all__ = ["available", "expert_mlp"]


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
    num_experts, top_k = gate_up.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = flat.sort(stable=True).indices
    of_expert = torch.bincount(flat.clamp(-1, num_experts) + 1, minlength=num_experts + 2)
    found = torch.zeros(flat.shape[0], x.shape[1])
    start = 0
    for expert, count in enumerate(of_expert.tolist(), start=-1):  # host: a CPU tensor
        pairs = order[start : start + count]
        start += count
        if not count or not 0 <= expert < num_experts:
            continue
        weight = weights.flatten()[pairs, None]
        inputs = x[pairs // top_k]
        if weigh_inputs:
            inputs = (inputs * weight).to(x.dtype)
        first = matrix(gate_up, gate_up_scales, expert, x.dtype)
        inner = activate(product(inputs, first, row(gate_up_bias, expert)), act, gated, limit, alpha).to(x.dtype)
        result = product(inner, matrix(down, down_scales, expert, x.dtype), row(down_bias, expert))
        found[pairs] = result if weigh_inputs else result * weight
    return in_order(found.unflatten(0, ids.shape)).to(x.dtype)
