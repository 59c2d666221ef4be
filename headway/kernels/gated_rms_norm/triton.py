"""Triton kernel of ``gated_rms_norm``: a program for a large group of a token, or for several small ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

ELEMENTS = 2048
"""Of a program, where a group is smaller: a group alone would keep a warp waiting for memory most of the time."""


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
    pairs,  # of tokens and groups
    groups,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    token, group = (pair // groups).to(tl.int64), pair % groups
    at = tl.arange(0, BLOCK)
    mask = (pair < pairs)[:, None] & (at < SIZE)[None, :]
    weight = tl.load(weight_ptr + (group * weight_step)[:, None] + at[None, :], mask=mask, other=0.0)
    wait_for_inputs(EARLY)
    inside = (group * SIZE)[:, None] + at[None, :]
    x = tl.load(x_ptr + (token * x_stride)[:, None] + inside, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + (token * gate_stride)[:, None] + inside, mask=mask, other=0.0).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        opened = gate * opened
    if GATE_FIRST:
        x = x * opened
    kind = y_ptr.dtype.element_ty
    normed = (x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]).to(kind)
    y = normed * weight
    if not GATE_FIRST:
        y = y.to(tl.float32) * opened
    tl.store(y_ptr + pair.to(tl.int64)[:, None] * SIZE + at[None, :], y.to(kind), mask=mask)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool, sigmoid: bool
) -> torch.Tensor:
    tokens, channels = x.shape
    assert x.stride(1) == gate.stride(1) == 1, "channels lie side by side"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, groups = next_power_of_2(group), channels // group
    each = max(1, ELEMENTS // block)
    gated_rms_norm_kernel[(cdiv(tokens * groups, each),)](
        x, gate, weight, y, x.stride(0), gate.stride(0), eps, group if len(weight) == channels else 0, tokens * groups, groups,
        SIZE=group, PAIRS=each, BLOCK=block, GATE_FIRST=gate_first, SIGMOID=sigmoid,
        num_warps=4 if each > 1 else max(4, min(8, block // 256)), **launch_early(x.device),
    )  # fmt: skip
    return y
