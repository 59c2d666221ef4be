"""Triton kernel of ``rms_norm`` and its adding forms: each row is read once and stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

MANY_ROWS = 2048
"""From this many rows on, a program takes several short rows: fewer, larger programs stream better."""


@triton.jit
def normed(x, weight, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Rows of x, f32 with zeros beyond SIZE, with the norm's two roundings to ``dtype``."""
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    return ((x * rstd[:, None]).to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [T, C], or f32 [PARTS, T, C]
    residual_ptr,  # [T, C], read and written when ADD
    weight_ptr,  # [C] when NORM
    after_ptr,  # [C] when AFTER: of the norm of x
    scale_ptr,  # [1] when SCALED: of the sum
    out_ptr,  # [T, C] contiguous
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    AFTER: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
    SCALED: tl.constexpr = False,
    FACTOR: tl.constexpr = 1.0,  # of what is added
):
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    col = tl.arange(0, BLOCK_C)[None, :]
    mask = (row < num_rows) & (col < SIZE)
    if NORM:
        weight = tl.load(weight_ptr + col, mask=col < SIZE, other=0.0).to(tl.float32)
    if AFTER:
        after = tl.load(after_ptr + col, mask=col < SIZE, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(scale_ptr).to(tl.float32)
    wait_for_inputs(EARLY)
    if PARTS > 0:
        total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(x_ptr + (part * num_rows + row) * SIZE + col, mask=mask, other=0.0)
        narrow = total.to(out_ptr.dtype.element_ty)
    else:
        narrow = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    x = narrow.to(tl.float32)
    if ADD:
        residual_at = residual_ptr + row * residual_stride + col
        if AFTER:
            x = normed(x, after, eps, SIZE, narrow.dtype).to(tl.float32)
        if FACTOR != 1.0:
            x = (x * FACTOR).to(narrow.dtype).to(tl.float32)
        x += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        narrow = x.to(narrow.dtype)
        if SCALED:
            narrow = (narrow.to(tl.float32) * scale).to(narrow.dtype)
        tl.store(residual_at, narrow, mask=mask)
        x = narrow.to(tl.float32)  # what the residual holds now, rounding included
    if NORM:
        tl.store(out_ptr + row * SIZE + col, normed(x, weight, eps, SIZE, narrow.dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float = 1.0
) -> torch.Tensor:
    return _launch(x, residual, weight, eps, factor=factor)


def add_parts_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float = 1.0
) -> torch.Tensor:
    assert parts.dtype == torch.float32 and parts.is_contiguous() and parts.shape[1:] == residual.shape
    return _launch(parts, residual, weight, eps, parts.shape[0], factor=factor)


def norm_add(
    x: torch.Tensor, after: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, factor: float = 1.0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    assert x.dim() == 2 or (x.dtype == torch.float32 and x.is_contiguous()), "parts are as linear_parts makes them"
    return _launch(x, residual, weight, eps, x.shape[0] if x.dim() == 3 else 0, after, factor, scale)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, parts: int = 0,
    after: torch.Tensor | None = None, factor: float = 1.0, scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    num_rows, size = x.shape[-2:]
    assert x.stride(-1) == 1 and (weight is None or weight.is_contiguous()), "rows must be contiguous"
    other = x if residual is None else residual
    out = torch.empty((num_rows if weight is not None else 0, size), dtype=other.dtype, device=x.device)
    block_c = next_power_of_2(size)
    block_r = max(1, 4096 // block_c) if num_rows >= MANY_ROWS else 1
    # One row: 8 elements (16 bytes of bf16) per thread, for latency. Several: 16, for fewer warps in the reduction.
    warps = min(16, max(1, block_r * block_c // (256 if block_r == 1 else 512)))
    weights = (other if each is None else each for each in (weight, after, scale))
    rms_norm_kernel[(cdiv(num_rows, block_r),)](
        x, other, *weights, out, num_rows, x.stride(-2), other.stride(0), eps,
        SIZE=size, BLOCK_R=block_r, BLOCK_C=block_c, ADD=residual is not None, PARTS=parts, AFTER=after is not None,
        NORM=weight is not None, SCALED=scale is not None, FACTOR=factor, num_warps=warps, **launch_early(x.device),
    )  # fmt: skip
    return out
