"""Triton kernel of ``add_layer_norm``: each row is read once and stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.add_layer_norm import reference
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

MANY_ROWS = 2048
"""From this many rows on, a program takes several short rows: fewer, larger programs stream better."""


@triton.jit(do_not_specialize=["num_rows"])
def add_layer_norm_kernel(
    x_ptr,  # [T, C]
    residual_ptr,  # [T, C]
    weight_ptr,  # [C]
    bias_ptr,  # [C], or None
    out_ptr,  # [T, C] contiguous
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    col = tl.arange(0, BLOCK_C)[None, :]
    inside = col < SIZE
    mask = (row < num_rows) & inside
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    shift = tl.zeros([1, BLOCK_C], tl.float32)
    if bias_ptr is not None:
        shift = tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    residual_at = residual_ptr + row * residual_stride + col
    narrow = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    added = (narrow.to(tl.float32) + tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)).to(narrow.dtype)
    tl.store(residual_at, added, mask=mask)
    x = added.to(tl.float32)  # what the residual holds now, rounding included
    centred = tl.where(inside, x - (tl.sum(x, axis=1) / SIZE)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / SIZE + eps)
    y = centred * rstd[:, None] * weight + shift
    tl.store(out_ptr + row * SIZE + col, y.to(narrow.dtype), mask=mask)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    num_rows, size = x.shape
    if residual.stride(1) != 1 < size:  # what a convolution leaves, once for each recording: two passes do
        return reference.add_layer_norm(x, residual, weight, bias, eps)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, size), dtype=residual.dtype, device=x.device)
    block_c = next_power_of_2(size)
    block_r = max(1, 4096 // block_c) if num_rows >= MANY_ROWS else 1
    warps = min(16, max(1, block_r * block_c // (256 if block_r == 1 else 512)))
    if num_rows:
        add_layer_norm_kernel[(cdiv(num_rows, block_r),)](
            x, residual, weight, bias, out, num_rows, x.stride(0), residual.stride(0), eps,
            SIZE=size, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps, **launch_early(x.device),
        )  # fmt: skip
    return out
