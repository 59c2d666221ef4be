"""Triton kernel of the fused linear layers: streams the weight once, activations come from the L2 cache.

A program owns some weight rows over their whole length, so nothing is reduced between programs and every result has one
order of summation. It takes its first ``HELD`` passes of weights into registers before it waits for the kernel before it
(see ``triton_early``): when the activations are there, what is left is short. With few rows (``SPLITS`` 0) products are
plain multiply-adds, summed within a thread, across threads once at the end. With more, tensor cores multiply: the warps of a
program take different parts of each pass over K (the batch dimension of the product) and their sums meet at the end.

The RMS norm of the few activation rows is computed by every program anew: they are small and the launch it saves is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv
from headway.kernels.silu_mul import GATES
from headway.kernels.silu_mul.triton import opened
from headway.kernels.skinny_linear.tile import Kind, Tile, padded_rows
from headway.kernels.skinny_linear.tiles import tile_for
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

STORE, SILU, ADD = 0, 1, -1
"""What becomes of a product: stored, gate and up combined (1 and on, by activation), added to what the output holds."""


@triton.jit
def normed(x, rstd, weight):
    """The norm's two roundings, as in ``rms_norm``; x in its dtype, all broadcastable."""
    return ((x.to(tl.float32) * rstd).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def load_columns(at, col, keep, K: tl.constexpr, STEP: tl.constexpr):
    """Elements of one pass; nothing is masked in K where passes divide it."""
    if K % STEP:
        return tl.load(at + col, mask=keep & (col < K), other=0.0)
    else:
        return tl.load(at + col, mask=keep, other=0.0)


@triton.jit
def hold(at, lane, keep, K: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr):
    """The first ``HELD`` passes along a row, in registers; a tuple."""
    held = ()
    for i in tl.static_range(HELD):
        part = load_columns(at, i * STEP + lane, keep, K, STEP)
        held = held + (part,)  # type: ignore[assignment]  # noqa: RUF005  Triton knows no unpacking
    return held


@triton.jit
def multiply_add(
    x_ptr, norm_ptr, weight_at, keep_row, weights, norms, x_stride, num_rows, eps,
    K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, WIDE]: products of the rows of x with WIDE weight rows, without tensor cores."""
    lane = tl.arange(0, BLOCK_K)
    token = tl.arange(0, ROWS)[:, None]
    y = tl.zeros([ROWS, WIDE], tl.float32)
    for t in tl.static_range(ROWS):
        x_at = x_ptr + t * x_stride
        keep_x = (lane >= 0) & (t < num_rows)
        xs = hold(x_at, lane, keep_x, K, BLOCK_K, HELD)
        rstd = 1.0
        if NORM:
            squares = tl.zeros([BLOCK_K], tl.float32)
            for i in tl.static_range(HELD):
                squares += xs[i].to(tl.float32) * xs[i].to(tl.float32)
            for start in range(HELD * BLOCK_K, K, BLOCK_K):
                later = load_columns(x_at, start + lane, keep_x, K, BLOCK_K).to(tl.float32)
                squares += later * later
            rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        acc = tl.zeros([WIDE, BLOCK_K], tl.float32)
        for i in tl.static_range(HELD):
            x = xs[i]
            if NORM:
                x = normed(x, rstd, norms[i])
            acc += weights[i].to(tl.float32) * x.to(tl.float32)[None, :]
        for start in tl.range(HELD * BLOCK_K, K, BLOCK_K, num_stages=STAGES):
            col = start + lane
            weight = load_columns(weight_at, col[None, :], keep_row, K, BLOCK_K)
            x = load_columns(x_at, col, keep_x, K, BLOCK_K)
            if NORM:
                x = normed(x, rstd, load_columns(norm_ptr, col, lane >= 0, K, BLOCK_K))
            acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        y = tl.where(token == t, tl.sum(acc, axis=1)[None, :], y)
    return y


@triton.jit
def multiply_dot(
    x_ptr, norm_ptr, weight_at, keep_row, weights, norms, x_stride, num_rows, eps,
    K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    HELD: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, WIDE], on tensor cores."""
    STEP: tl.constexpr = SPLITS * BLOCK_K
    lane = split_lanes(SPLITS, BLOCK_K)
    token = tl.arange(0, ROWS)[None, :, None]
    x_at = x_ptr + token * x_stride
    keep_x = token < num_rows
    xs = hold(x_at, lane, keep_x, K, STEP, HELD)
    rstd = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([SPLITS, ROWS], tl.float32)
        for i in tl.static_range(HELD):
            first = xs[i].to(tl.float32)
            squares += tl.sum(first * first, axis=2)
        for start in range(HELD * STEP, K, STEP):
            later = load_columns(x_at, start + lane, keep_x, K, STEP).to(tl.float32)
            squares += tl.sum(later * later, axis=2)
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    rstd = rstd[None, :, None]
    acc = tl.zeros([SPLITS, ROWS, WIDE], tl.float32)
    for i in tl.static_range(HELD):
        x = xs[i]
        if NORM:
            x = normed(x, rstd, norms[i])
        acc = tl.dot(x, tl.permute(weights[i], (0, 2, 1)), acc, input_precision="ieee")
    for start in tl.range(HELD * STEP, K, STEP, num_stages=STAGES):
        weight = load_columns(weight_at, start + lane, keep_row, K, STEP)
        x = load_columns(x_at, start + lane, keep_x, K, STEP)
        if NORM:
            x = normed(x, rstd, load_columns(norm_ptr, start + lane, lane >= 0, K, STEP))
        acc = tl.dot(x, tl.permute(weight, (0, 2, 1)), acc, input_precision="ieee")
    return tl.sum(acc, axis=0)


@triton.jit
def split_lanes(SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[SPLITS, 1, BLOCK_K]: the columns of one pass."""
    return tl.arange(0, SPLITS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]


@triton.jit(do_not_specialize=["num_rows"])
def skinny_linear_kernel(
    x_ptr,  # [T, K]
    norm_ptr,  # [K] when NORM
    weight_ptr,  # [N, K], for gates [2 * N, K]
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
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
    EARLY: tl.constexpr,
    FACTOR: tl.constexpr = 1.0,  # of what is added
):
    start_next(EARLY)
    PAIR: tl.constexpr = 2 if MODE > 0 else 1
    WIDE: tl.constexpr = PAIR * BLOCK_N
    first = tl.program_id(0) * BLOCK_N
    wide = tl.arange(0, WIDE)
    unit = first + wide // PAIR  # gate and up rows of an output lie side by side in the tile
    keep_row = unit < N
    row = (unit + (wide % PAIR) * N).to(tl.int64)
    weight_at = weight_ptr + row * K
    dtype = out_ptr.dtype.element_ty
    token = tl.arange(0, ROWS)
    col = first + tl.arange(0, BLOCK_N)
    at = out_ptr + token[:, None] * out_stride + col[None, :]
    keep = (token < num_rows)[:, None] & (col < N)[None, :]
    STEP: tl.constexpr = BLOCK_K * SPLITS if SPLITS > 0 else BLOCK_K
    if SPLITS == 0:
        weight_at, keep_row = weight_at[:, None], keep_row[:, None]
        lane, norm_lane = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_K)
    else:
        weight_at, keep_row = weight_at[None, :, None], keep_row[None, :, None]
        lane, norm_lane = split_lanes(SPLITS, BLOCK_K), split_lanes(SPLITS, BLOCK_K)
    weights = hold(weight_at, lane, keep_row, K, STEP, HELD)
    norms = hold(norm_ptr, norm_lane, norm_lane >= 0, K, STEP, HELD if NORM else 0)
    wait_for_inputs(EARLY)
    if MODE < 0:  # on its way while the product is made
        before = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    if SPLITS == 0:
        y = multiply_add(
            x_ptr, norm_ptr, weight_at, keep_row, weights, norms, x_stride, num_rows, eps,
            K, ROWS, WIDE, BLOCK_K, HELD, NORM, STAGES,
        )  # fmt: skip
    else:
        y = multiply_dot(
            x_ptr, norm_ptr, weight_at, keep_row, weights, norms, x_stride, num_rows, eps,
            K, ROWS, WIDE, BLOCK_K, SPLITS, HELD, NORM, STAGES,
        )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + row, mask=unit < N, other=0.0).to(tl.float32)[None, :]
    y = y.to(dtype).to(tl.float32)
    if MODE > 0:
        gate, up = tl.split(tl.reshape(y, (ROWS, BLOCK_N, 2)))
        y = opened(gate, MODE).to(dtype).to(tl.float32) * up
    if MODE < 0:
        if FACTOR != 1.0:
            y = (y * FACTOR).to(dtype).to(tl.float32)
        y += before
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
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, weight: torch.Tensor, bias: torch.Tensor | None, act: str = "silu"
) -> torch.Tensor:  # fmt: skip
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    kind: Kind = "gate_up" if norm is None else "norm_gate_up"
    mode, tile = SILU + GATES.index(act), tile_for(kind, x.shape[0], *weight.shape)
    launch(x, norm, eps, weight, bias, out, mode, tile)
    return out


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, factor: float = 1.0
) -> None:
    launch(x, None, 0.0, weight, bias, residual, ADD, tile_for("linear_add", x.shape[0], *weight.shape), factor)


def launch(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    mode: int,
    tile: Tile,
    factor: float = 1.0,
) -> None:
    """out [T, N] from x [T, K]; ``mode`` is STORE, ADD (``factor`` times the product) or SILU and on."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous(), "rows must be contiguous"
    assert weight.shape == ((2 if mode > 0 else 1) * outputs, inputs)
    if rows == 0:
        return
    skinny_linear_kernel[(cdiv(outputs, tile.block_n),)](
        x, x if norm is None else norm, weight, x if bias is None else bias, out,
        rows, x.stride(0), out.stride(0), eps,
        N=outputs, K=inputs, ROWS=padded_rows(rows, tile), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLITS=tile.splits,
        HELD=min(tile.held, cdiv(inputs, tile.step)), STAGES=tile.num_stages,
        NORM=norm is not None, BIAS=bias is not None, MODE=mode, FACTOR=factor,
        num_warps=tile.num_warps, **launch_early(x.device),
    )  # fmt: skip
