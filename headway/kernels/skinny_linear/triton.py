"""Triton kernel of the fused linear layers: streams the weight once, activations come from the L2 cache.

A program owns some weight rows over their whole length, so nothing is reduced between programs and every result has one
order of summation. With few rows (``SPLITS`` 0) products are plain multiply-adds, summed within a thread along its 16-byte
loads, across threads once at the end. With more, tensor cores multiply: the warps of a program take different parts of each
pass over K (the batch dimension of the product) and their sums meet at the end.

The RMS norm of the few activation rows is computed by every program anew: they are small and the launch it saves is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv
from headway.kernels.skinny_linear.tiles import Tile, row_bucket, tile_for

LOG2E = tl.constexpr(1.4426950408889634)
STORE, SILU, ADD = 0, 1, 2
"""What becomes of a product: stored, gate and up combined, added to what the output holds."""


@triton.jit
def inverse_rms(x_ptr, x_stride, num_rows, eps, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS] f32: 1 / sqrt(mean(x^2) + eps)."""
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, K, BLOCK):
        col = start + tl.arange(0, BLOCK)
        keep = (row < num_rows)[:, None] & (col < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=keep, other=0.0).to(tl.float32)
        total += tl.sum(x * x, axis=1)
    return tl.rsqrt(total / K + eps)


@triton.jit
def normed(x, rstd, weight):
    """The norm's two roundings, as in ``rms_norm``; x in its dtype, all broadcastable."""
    return ((x.to(tl.float32) * rstd).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def multiply_add(
    x_ptr, norm_ptr, weight_ptr, row, keep_row, rstd, x_stride, num_rows,
    K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, WIDE]: products of the rows of x with WIDE weight rows, without tensor cores."""
    token = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK_K)
        keep = col < K if K % BLOCK_K else tl.full([BLOCK_K], True, tl.int1)
        at = weight_ptr + row[:, None] * K + col[None, :]
        weight = tl.load(at, mask=keep_row[:, None] & keep[None, :], other=0.0, eviction_policy="evict_first")
        x_keep = (token < num_rows)[:, None] & keep[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride + col[None, :], mask=x_keep, other=0.0)
        if NORM:
            x = normed(x, rstd[:, None], tl.load(norm_ptr + col, mask=keep, other=0.0)[None, :])
        product = weight.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
        acc += tl.sum(product, axis=2)
    return acc


@triton.jit
def multiply_dot(
    x_ptr, norm_ptr, weight_ptr, row, keep_row, rstd, x_stride, num_rows,
    K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, WIDE], on tensor cores."""
    token = tl.arange(0, ROWS)[None, :, None]
    part = tl.arange(0, SPLITS)[:, None, None] * BLOCK_K
    acc = tl.zeros([SPLITS, ROWS, WIDE], tl.float32)
    for start in tl.range(0, K, SPLITS * BLOCK_K, num_stages=STAGES):
        col = start + part + tl.arange(0, BLOCK_K)[None, None, :]  # [SPLITS, 1, BLOCK_K]
        keep = col < K if K % (SPLITS * BLOCK_K) else tl.full([SPLITS, 1, BLOCK_K], True, tl.int1)
        at = weight_ptr + row[None, :, None] * K + col
        weight = tl.load(at, mask=keep_row[None, :, None] & keep, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + token * x_stride + col, mask=(token < num_rows) & keep, other=0.0)
        if NORM:
            x = normed(x, rstd[None, :, None], tl.load(norm_ptr + col, mask=keep, other=0.0))
        acc = tl.dot(x, tl.permute(weight, (0, 2, 1)), acc, input_precision="ieee")
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def skinny_linear_kernel(
    x_ptr,  # [T, K]
    norm_ptr,  # [K] when NORM
    weight_ptr,  # [N, K], for SILU [2 * N, K]
    bias_ptr,  # [N] or [2 * N] when BIAS
    out_ptr,  # [T, N]
    num_rows,
    x_stride,
    out_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
):
    PAIR: tl.constexpr = 2 if MODE == 1 else 1
    WIDE: tl.constexpr = PAIR * BLOCK_N
    first = tl.program_id(0) * BLOCK_N
    wide = tl.arange(0, WIDE)
    unit = first + wide // PAIR  # gate and up rows of an output lie side by side in the tile
    keep_row = unit < N
    row = (unit + (wide % PAIR) * N).to(tl.int64)
    rstd = tl.zeros([ROWS], tl.float32)
    if NORM:
        BLOCK: tl.constexpr = 4096 // ROWS if K > 4096 // ROWS else K
        rstd = inverse_rms(x_ptr, x_stride, num_rows, eps, K, ROWS, triton.next_power_of_2(BLOCK))
    if SPLITS == 0:
        y = multiply_add(
            x_ptr, norm_ptr, weight_ptr, row, keep_row, rstd, x_stride, num_rows, K, ROWS, WIDE, BLOCK_K, NORM, STAGES
        )
    else:
        y = multiply_dot(
            x_ptr, norm_ptr, weight_ptr, row, keep_row, rstd, x_stride, num_rows, K, ROWS, WIDE, BLOCK_K, SPLITS,
            NORM, STAGES,
        )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + row, mask=keep_row, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    token = tl.arange(0, ROWS)
    col = first + tl.arange(0, BLOCK_N)
    at = out_ptr + token[:, None] * out_stride + col[None, :]
    keep = (token < num_rows)[:, None] & (col < N)[None, :]
    y = y.to(dtype).to(tl.float32)
    if MODE == 1:
        gate, up = tl.split(tl.reshape(y, (ROWS, BLOCK_N, 2)))
        y = (gate / (1.0 + tl.exp2(-gate * LOG2E))).to(dtype).to(tl.float32) * up
    if MODE == 2:
        y += tl.load(at, mask=keep, other=0.0).to(tl.float32)
    tl.store(at, y.to(dtype), mask=keep)


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, None, 0.0, weight, bias, out, STORE, tile_for("skinny_linear", x.shape[0], *weight.shape))
    return out


def norm_linear(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, norm, eps, weight, bias, out, STORE, tile_for("norm_linear", x.shape[0], *weight.shape))
    return out


def norm_gate_up(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    launch(x, norm, eps, weight, bias, out, SILU, tile_for("norm_gate_up", x.shape[0], *weight.shape))
    return out


def linear_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
    launch(x, None, 0.0, weight, bias, residual, ADD, tile_for("linear_add", x.shape[0], *weight.shape))


def launch(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    mode: int,
    tile: Tile,
) -> None:
    """out [T, N] from x [T, K]; ``mode`` is STORE, SILU or ADD."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous(), "rows must be contiguous"
    assert weight.shape == ((2 if mode == SILU else 1) * outputs, inputs)
    if rows == 0:
        return
    bucket = row_bucket(rows) if tile.splits == 0 else max(16, row_bucket(rows))
    skinny_linear_kernel[(cdiv(outputs, tile.block_n),)](
        x, x if norm is None else norm, weight, x if bias is None else bias, out,
        rows, x.stride(0), out.stride(0), eps,
        N=outputs, K=inputs, ROWS=bucket, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLITS=tile.splits,
        STAGES=tile.num_stages, NORM=norm is not None, BIAS=bias is not None, MODE=mode,
        num_warps=tile.num_warps,
    )  # fmt: skip
