"""Launches the kernel of the gated MLP for many tokens."""

from __future__ import annotations

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv
from headway.kernels.paged_attention.tiles import num_sms
from headway.kernels.wide_linear.triton import gate_up_kernel

BLOCK_M = BLOCK_N = 128
BLOCK_K = 64
STAGES, GROUP = 4, 16
FLAT, PAIRED = NVMMASharedLayout(128, 16, 2), NVMMASharedLayout(128, 16, 3)


def wide_gate_up(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    launch(x, weight, out)
    return out


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, group: int = GROUP, stages: int = STAGES) -> None:
    """out [T, N] from x [T, K] and weight [2 * N, K]."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    assert x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype == out.dtype
    assert weight.shape == (2 * outputs, inputs) and weight.is_contiguous() and out.is_contiguous()
    assert x.stride(1) == 1 and inputs % BLOCK_K == 0 and outputs % 8 == 0
    if rows == 0:
        return
    tiles_m, tiles_n = cdiv(rows, BLOCK_M), cdiv(outputs, BLOCK_N)
    x_desc = TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [BLOCK_M, BLOCK_K], FLAT)
    pairs = TensorDescriptor(weight, [2, outputs, inputs], [outputs * inputs, inputs, 1], [2, BLOCK_N, BLOCK_K], PAIRED)
    out_desc = TensorDescriptor(out, [rows, outputs], [outputs, 1], [BLOCK_M // 2, BLOCK_N], FLAT)
    gate_up_kernel[(min(num_sms(x.device), tiles_m * tiles_n),)](
        x_desc, pairs, out_desc, tiles_m, tiles_n, K=inputs, STAGES=stages, GROUP=group, num_warps=4
    )
