"""Launches the kernels of the wide products for many tokens."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.silu_mul import GATES
from headway.kernels.triton_early import launch_early
from headway.kernels.triton_precompile import only_noted
from headway.kernels.wide_linear.hopper.triton import gate_up_kernel, sums_kernel
from headway.kernels.wide_linear.hopper.triton_gate_up import gate_up_pairs_kernel
from headway.kernels.wide_linear.hopper.triton_qkv import qkv_kernel
from headway.kernels.wide_linear.hopper.triton_turns import turns_kernel
from headway.kernels.wide_linear.tiles import (
    BLOCK_K,
    BLOCK_M,
    GROUP,
    HEAD_SIZE,
    NARROW,
    STAGES,
    TURN_STAGES,
    UNEVEN,
    WIDE,
    finishing_warps,
    gelu_warps,
    tile_width,
)

ROWS = BLOCK_M // 2
FLAT, PARTED = NVMMASharedLayout(128, 16, 2), NVMMASharedLayout(128, 16, 3)


def wide_gate_up(x: torch.Tensor, weight: torch.Tensor, act: str = "silu") -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    launch_gate_up(x, weight, out, gate=GATES.index(act) + 1)
    return out


def launch_gate_up(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, group: int = GROUP, wide: int | None = None, gate: int = 1
) -> None:
    """out [T, N] from x [T, K] and weight [2 * N, K], in tiles of ``wide`` weight rows or as many as fit best."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    assert weight.shape == (2 * outputs, inputs) and out.dtype == x.dtype and out.is_contiguous() and outputs % 8 == 0
    if rows == 0:
        return
    wide = wide or tile_width(rows, 2 * outputs, num_sms(x.device), (WIDE, UNEVEN, NARROW))
    tiles_m, tiles_n = cdiv(rows, BLOCK_M), cdiv(2 * outputs, wide)
    grid = (min(num_sms(x.device), tiles_m * tiles_n),)
    if wide == UNEVEN:
        parts = (NARROW, UNEVEN - NARROW)
        layouts = [NVMMASharedLayout(min(part, 128), 16, 2) for part in parts]
        outs = [
            TensorDescriptor(out, [rows, outputs], [outputs, 1], [ROWS, part // 2], layout)
            for part, layout in zip(parts, layouts, strict=True)
        ]
        gate_up_pairs_kernel[grid](
            _activations(x), *[weight_descriptor(weight, 2, part) for part in parts], *outs, tiles_m, tiles_n, K=inputs,
            STAGES=STAGES[wide], GROUP=group, GATE=gate, num_warps=4, **launch_early(x.device),
        )  # fmt: skip
        return
    gate_up_kernel[grid](
        _activations(x), weight_descriptor(weight, 2, wide), out, rows, tiles_m, tiles_n, N=outputs, K=inputs,
        STAGES=STAGES[wide], GROUP=group, GATE=gate, num_warps=4, **launch_early(x.device),
    )  # fmt: skip


def wide_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> None:
    launch_sums(x, weight, residual, factor=factor)


def wide_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tanh: bool) -> torch.Tensor:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    forms: tuple[int, ...] = (gelu_warps(rows, outputs, inputs, num_sms(x.device)),)
    if only_noted():  # a step of another size may take the other form
        forms = (0, finishing_warps(inputs))
    for warps in forms:
        launch_gelu(x, weight, bias, out, tanh, warps)
    return out


def launch_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, tanh: bool, warps: int
) -> None:
    """out [T, N] = GELU(x W^T + bias); ``warps`` as ``gelu_warps`` says."""
    assert x.dtype == bias.dtype == torch.bfloat16, "GELU is fitted to bfloat16's last place"
    assert bias.shape == (weight.shape[0],) and bias.is_contiguous()
    gelu = 2 if tanh else 3
    if warps:
        launch_sums(x, weight, out, bias=bias, gelu=gelu, warps=warps)
    else:
        launch_turns(x, weight, bias, out, gelu)


def launch_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gelu: int = 0,
    factor: float = 1.0,
    warps: int = 2,
) -> None:
    """out [T, N]; ``gelu`` as in ``sums_kernel``, ``factor`` for sums without it, ``warps`` finish tiles."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert out.shape == (rows, outputs) and out.dtype == x.dtype and out.is_contiguous()
    assert outputs % 8 == 0 and rows * outputs < 2**31
    if rows == 0:
        return
    tiles_m, tiles_n = cdiv(rows, BLOCK_M), cdiv(outputs, WIDE)
    sums_kernel[(min(num_sms(x.device), tiles_m * tiles_n),)](
        _activations(x), weight_descriptor(weight, 1, WIDE), out, out if bias is None else bias, rows, tiles_m, tiles_n,
        N=outputs, K=inputs, STAGES=STAGES[WIDE], GROUP=GROUP, GELU=gelu, FACTOR=factor, WARPS=warps, num_warps=4,
        **launch_early(x.device),
    )  # fmt: skip


def launch_turns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, gelu: int) -> None:
    """out [T, N] by warpgroups that take turns."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert out.shape == (rows, outputs) and out.dtype == x.dtype and out.is_contiguous() and outputs % 8 == 0
    if rows == 0:
        return
    tiles_m, tiles_n = cdiv(rows, BLOCK_M), cdiv(outputs, NARROW)
    out_desc = TensorDescriptor(out, [rows, outputs], [outputs, 1], [BLOCK_M, NARROW], FLAT)
    turns_kernel[(min(num_sms(x.device), tiles_m * tiles_n),)](
        _activations(x), weight_descriptor(weight, 1, NARROW), out_desc, bias, tiles_m, tiles_n, N=outputs, K=inputs,
        STAGES=TURN_STAGES, GROUP=GROUP, GELU=gelu, num_warps=4, **launch_early(x.device),
    )  # fmt: skip


def wide_qkv(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    others = (*others, tile_width(x.shape[0], weight.shape[0], num_sms(x.device)))
    return launch_qkv(x, weight, *others)


def launch_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    wide: int,
) -> torch.Tensor:
    """q [T, H, D], in tiles of ``wide`` weight rows."""
    rows, inputs = x.shape
    num_blocks, block_size, kv_heads, size = k_cache.shape
    q = torch.empty((rows, num_heads, size), dtype=x.dtype, device=x.device)
    if rows == 0:
        return q
    assert size == cos_sin.shape[1] == HEAD_SIZE and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert num_heads % 2 == kv_heads % 2 == 0 and weight.shape == ((num_heads + 2 * kv_heads) * size, inputs)
    assert (q_norm is None) == (k_norm is None), "both norms, or none"
    assert all(norm is None or norm.dtype == x.dtype for norm in (q_norm, k_norm))
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1 and k_cache.dtype == v_cache.dtype
    assert k_cache.dtype in (x.dtype, torch.float8_e4m3fn)
    tiles_m, tiles_n = cdiv(rows, BLOCK_M), weight.shape[0] // wide
    qkv_kernel[(min(num_sms(x.device), tiles_m * tiles_n),)](
        _activations(x), weight_descriptor(weight, 1, wide), q, positions, cos_sin, cos_sin if q_norm is None else q_norm,
        cos_sin if k_norm is None else k_norm, kv_slots, k_cache, v_cache, eps, rows, cos_sin.shape[0],
        num_blocks * block_size, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), tiles_m, tiles_n,
        H=num_heads, KH=kv_heads, BS=block_size, NORM=q_norm is not None, K=inputs, STAGES=STAGES[wide], GROUP=GROUP,
        num_warps=4, **launch_early(x.device),
    )  # fmt: skip
    return q


def _activations(x: torch.Tensor) -> TensorDescriptor:
    assert x.dtype in (torch.bfloat16, torch.float16) and x.stride(1) == 1 and x.shape[1] % BLOCK_K == 0
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [BLOCK_M, BLOCK_K], FLAT)


def weight_descriptor(weight: torch.Tensor, parts: int, wide: int) -> TensorDescriptor:
    """``weight`` [parts * N, K] as [parts, N, K]: a tile of ``wide`` rows has equal shares of all parts."""
    assert weight.is_contiguous()
    outputs, inputs = weight.shape[0] // parts, weight.shape[1]
    strides = [outputs * inputs, inputs, 1]
    return TensorDescriptor(weight, [parts, outputs, inputs], strides, [parts, wide // parts, BLOCK_K], PARTED)
