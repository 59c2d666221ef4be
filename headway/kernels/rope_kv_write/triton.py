"""Triton kernel of ``rope_kv_write``: one program per token and block of heads, all sections in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs


@triton.jit
def load_heads(base, head, dim, keep, D: tl.constexpr):
    """[BLOCK_H, block of dims] in the stored dtype; ``keep`` masks both."""
    return tl.load(base + head[:, None] * D + dim[None, :], mask=keep, other=0.0)


@triton.jit
def load_norm(ptr, dim, keep_dim, NORM: tl.constexpr):
    """The weights of a head's norm; where there is none, a placeholder."""
    if NORM:
        return tl.load(ptr + dim, mask=keep_dim, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def scaled(x, rstd, weight):
    """Per-head RMS norm with HF's rounding: normalise, round, times weight, round."""
    normed = (x.to(tl.float32) * rstd[:, None]).to(x.dtype).to(tl.float32)
    return (normed * weight[None, :]).to(x.dtype)


@triton.jit
def as_cached(x, dtype: tl.constexpr):
    """``x`` in a cache's dtype; 8-bit floats end at their largest value, NaN stays."""
    if dtype == tl.float8e4nv:
        x = x.to(tl.float32)
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(dtype)


@triton.jit
def turn_heads(
    source,  # the token's first head of this section
    target,  # where that head goes
    target_stride,  # between heads there
    norm_ptr,
    angles,  # the token's row of cos_sin
    head,
    num_heads,
    eps,
    write,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Norm and rotate a block of heads of one token and store it when ``write``; waits for the projections."""
    dim = tl.arange(0, BLOCK_HALF)
    keep_dim = dim < HALF
    cos = tl.load(angles + dim, mask=keep_dim, other=1.0)[None, :]
    sin = tl.load(angles + HALF + dim, mask=keep_dim, other=0.0)[None, :]
    first_norm = load_norm(norm_ptr, dim, keep_dim, NORM)
    second_norm = load_norm(norm_ptr + HALF, dim, keep_dim, NORM)
    wait_for_inputs(EARLY)
    keep_head = (head < num_heads)[:, None]
    keep = keep_head & keep_dim[None, :]
    first = load_heads(source, head, dim, keep, D)
    second = load_heads(source + HALF, head, dim, keep, D)
    rest_dim = 2 * HALF + tl.arange(0, BLOCK_REST)
    keep_rest = keep_head & (rest_dim < D)[None, :]
    if NORM:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        total = tl.sum(a * a + b * b, axis=1)
        if 2 * HALF < D:
            rest = load_heads(source, head, rest_dim, keep_rest, D).to(tl.float32)
            total += tl.sum(rest * rest, axis=1)
        rstd = tl.rsqrt(total / D + eps)
        first = scaled(first, rstd, first_norm)
        second = scaled(second, rstd, second_norm)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    place = target + head[:, None] * target_stride + dim[None, :]
    dtype: tl.constexpr = place.dtype.element_ty
    tl.store(place, as_cached((a * cos - b * sin).to(first.dtype), dtype), mask=keep & write)
    tl.store(place + HALF, as_cached((b * cos + a * sin).to(first.dtype), dtype), mask=keep & write)
    if 2 * HALF < D:
        tail = load_heads(source, head, rest_dim, keep_rest, D)
        if NORM:
            tail = scaled(tail, rstd, load_norm(norm_ptr, rest_dim, rest_dim < D, NORM))
        place = target + head[:, None] * target_stride + rest_dim[None, :]
        tl.store(place, as_cached(tail, dtype), mask=keep_rest & write)


@triton.jit(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "kv_slots_ptr"],
)
def rope_kv_write_kernel(
    qkv_ptr,  # [T, (H + 2 * KH) * D]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [L, 2 * HALF]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    kv_slots_ptr,  # [T]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    q_ptr,  # [T, H, D]
    eps,
    num_positions,
    num_slots,  # NB * BS
    qkv_stride,
    block_stride,
    offset_stride,
    head_stride,
    H: tl.constexpr,
    KH: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    head = tl.arange(0, BLOCK_H)
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    angles = cos_sin_ptr + position.to(tl.int64) * (2 * HALF)
    source = qkv_ptr + token * qkv_stride
    Q_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (KH + BLOCK_H - 1) // BLOCK_H
    slot = tl.load(kv_slots_ptr + token)
    if section < Q_BLOCKS:
        turn_heads(
            source, q_ptr + token * (H * D), D, q_norm_ptr, angles, section * BLOCK_H + head, H, eps, True,
            D, HALF, BLOCK_HALF, BLOCK_REST, Q_NORM, EARLY,
        )  # fmt: skip
    else:
        write = (slot >= 0) & (slot < num_slots)
        slot = tl.where(write, slot, 0)
        place = (slot // BS).to(tl.int64) * block_stride + (slot % BS) * offset_stride
        if section < Q_BLOCKS + K_BLOCKS:
            turn_heads(
                source + H * D, k_ptr + place, head_stride, k_norm_ptr, angles, (section - Q_BLOCKS) * BLOCK_H + head,
                KH, eps, write, D, HALF, BLOCK_HALF, BLOCK_REST, K_NORM, EARLY,
            )  # fmt: skip
        else:
            head += (section - Q_BLOCKS - K_BLOCKS) * BLOCK_H
            dim = tl.arange(0, BLOCK_D)
            keep = (head < KH)[:, None] & (dim < D)[None, :]
            wait_for_inputs(EARLY)
            v = load_heads(source + (H + KH) * D, head, dim, keep, D)
            v_at = v_ptr + place + head[:, None] * head_stride + dim[None, :]
            tl.store(v_at, as_cached(v, v_ptr.dtype.element_ty), mask=keep & write)


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    num_tokens = qkv.shape[0]
    num_blocks, block_size, kv_heads, size = k_cache.shape
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous(), "rows must be contiguous"
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "cache rows must be contiguous"
    q = torch.empty((num_tokens, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    half = cos_sin.shape[1] // 2
    block_h = min(16, max(2, next_power_of_2(kv_heads)))  # the K and V sections fill their tile
    block_half = next_power_of_2(half)
    sections = cdiv(num_heads, block_h) + 2 * cdiv(kv_heads, block_h)
    rope_kv_write_kernel[(num_tokens, sections)](
        qkv, positions, cos_sin, cos_sin if q_norm is None else q_norm, cos_sin if k_norm is None else k_norm,
        kv_slots, k_cache, v_cache, q, eps, cos_sin.shape[0], num_blocks * block_size,
        qkv.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        H=num_heads, KH=kv_heads, D=size, BS=block_size, HALF=half,
        BLOCK_H=block_h, BLOCK_D=next_power_of_2(size), BLOCK_HALF=block_half,
        BLOCK_REST=next_power_of_2(max(1, size - 2 * half)), Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        num_warps=min(4, max(1, block_h * block_half // 256)),  # 8 elements of each half per thread
        **launch_early(qkv.device),
    )  # fmt: skip
    return q
