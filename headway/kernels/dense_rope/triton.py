"""Triton kernel of ``dense_rope``: one program per token and block of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.rope_kv_write.triton import turn_heads


@triton.jit
def dense_rope_kernel(
    qkv_ptr,  # [T, (H + 2 * KH) * D]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [L, 2 * HALF]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    eps,
    num_positions,
    qkv_stride,
    H: tl.constexpr,
    KH: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    head = tl.arange(0, BLOCK_H)
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    angles = cos_sin_ptr + position.to(tl.int64) * (2 * HALF)
    source = qkv_ptr + token * qkv_stride
    Q_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    if section < Q_BLOCKS:
        turn_heads(
            source, source, D, q_norm_ptr, angles, section * BLOCK_H + head, H, eps, True,
            D, HALF, BLOCK_HALF, BLOCK_REST, Q_NORM, False,
        )  # fmt: skip
    else:
        turn_heads(
            source + H * D, source + H * D, D, k_norm_ptr, angles, (section - Q_BLOCKS) * BLOCK_H + head, KH, eps, True,
            D, HALF, BLOCK_HALF, BLOCK_REST, K_NORM, False,
        )  # fmt: skip


def dense_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous(), "rows must be contiguous"
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    half = cos_sin.shape[1] // 2
    block_h = min(16, max(2, next_power_of_2(num_kv_heads)))
    block_half = next_power_of_2(half)
    dense_rope_kernel[(qkv.shape[0], cdiv(num_heads, block_h) + cdiv(num_kv_heads, block_h))](
        qkv, positions, cos_sin, cos_sin if q_norm is None else q_norm, cos_sin if k_norm is None else k_norm,
        eps, cos_sin.shape[0], qkv.stride(0),
        H=num_heads, KH=num_kv_heads, D=size, HALF=half, BLOCK_H=block_h, BLOCK_HALF=block_half,
        BLOCK_REST=next_power_of_2(max(1, size - 2 * half)), Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        num_warps=min(4, max(1, block_h * block_half // 256)),
    )  # fmt: skip
