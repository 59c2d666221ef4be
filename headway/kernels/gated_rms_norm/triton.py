"""Triton kernel of ``gated_rms_norm``: a program for each token and group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import next_power_of_2
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs


@triton.jit
def gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    gate_stride,
    eps,
    weight_step,  # 0 where groups share their weights
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    weight = tl.load(weight_ptr + group * weight_step + at, mask=mask, other=0.0)
    wait_for_inputs(EARLY)
    x = tl.load(x_ptr + token * x_stride + group * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + group * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        opened = gate * opened
    if GATE_FIRST:
        x = x * opened
    kind = y_ptr.dtype.element_ty
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(kind)
    y = normed * weight
    if not GATE_FIRST:
        y = y.to(tl.float32) * opened
    tl.store(y_ptr + (token * tl.num_programs(1) + group) * SIZE + at, y.to(kind), mask=mask)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool, sigmoid: bool
) -> torch.Tensor:
    tokens, channels = x.shape
    assert x.stride(1) == gate.stride(1) == 1, "channels lie side by side"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(group)
    gated_rms_norm_kernel[(tokens, channels // group)](
        x, gate, weight, y, x.stride(0), gate.stride(0), eps, group if len(weight) == channels else 0,
        SIZE=group, BLOCK=block, GATE_FIRST=gate_first, SIGMOID=sigmoid, num_warps=max(1, min(8, block // 256)),
        **launch_early(x.device),
    )  # fmt: skip
    return y
