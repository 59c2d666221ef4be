"""Triton kernel of ``mla_write``: one program per token and block of query heads, and one per token for its latent."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.rope_kv_write.triton import as_cached
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_math import widened

HEADS = 16
"""Of a program, at most."""


@triton.jit(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "kv_slots_ptr"],
)
def mla_write_kernel(
    q_ptr,  # [T, H, D]
    kv_ptr,  # [T, RANK + 2 * HALF]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [P, 2 * HALF]
    norm_ptr,  # [RANK]
    kv_slots_ptr,  # [T]
    latents_ptr,  # [NB, BS, RANK + 2 * HALF]
    latent_ptr,  # [T, RANK + 2 * HALF]
    eps,
    num_positions,
    num_slots,  # NB * BS
    q_stride,
    head_stride,
    kv_stride,
    block_stride,
    offset_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    slot = tl.load(kv_slots_ptr + token)
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    angles = cos_sin_ptr + position.to(tl.int64) * (2 * HALF) + half
    cos = tl.load(angles, mask=in_half, other=1.0)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    if section > 0:
        head = (section - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        keep = (head < H)[:, None] & in_half[None, :]
        at = q_ptr + token * q_stride + head[:, None] * head_stride + (D - 2 * HALF) + half[None, :]
        wait_for_inputs(EARLY)
        even = tl.load(at, mask=keep, other=0.0)
        odd = tl.load(at + HALF, mask=keep, other=0.0)
        tl.store(at, (even.to(tl.float32) * cos[None, :] - odd.to(tl.float32) * sin[None, :]).to(even.dtype), mask=keep)
        tl.store(
            at + HALF,
            (odd.to(tl.float32) * cos[None, :] + even.to(tl.float32) * sin[None, :]).to(even.dtype),
            mask=keep,
        )
    else:
        dim = tl.arange(0, BLOCK_RANK)
        in_rank = dim < RANK
        weight = tl.load(norm_ptr + dim, mask=in_rank, other=0.0).to(tl.float32)
        write = (slot >= 0) & (slot < num_slots)
        slot = tl.where(write, slot, 0)
        place = latents_ptr + (slot // BS).to(tl.int64) * block_stride + (slot % BS) * offset_stride
        mine = latent_ptr + token * (RANK + 2 * HALF)
        wait_for_inputs(EARLY)
        source = kv_ptr + token * kv_stride
        x = tl.load(source + dim, mask=in_rank, other=0.0)
        wide = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
        normed = ((wide * rstd).to(x.dtype).to(tl.float32) * weight).to(x.dtype)
        first = tl.load(source + RANK + half, mask=in_half, other=0.0)
        second = tl.load(source + RANK + HALF + half, mask=in_half, other=0.0)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        dtype: tl.constexpr = latents_ptr.dtype.element_ty
        kept = as_cached(normed, dtype)
        low = as_cached((a * cos - b * sin).to(x.dtype), dtype)
        high = as_cached((b * cos + a * sin).to(x.dtype), dtype)
        tl.store(place + dim, kept, mask=in_rank & write)
        tl.store(place + RANK + half, low, mask=in_half & write)
        tl.store(place + RANK + HALF + half, high, mask=in_half & write)
        tl.store(mine + dim, widened(kept, x.dtype), mask=in_rank)
        tl.store(mine + RANK + half, widened(low, x.dtype), mask=in_half)
        tl.store(mine + RANK + HALF + half, widened(high, x.dtype), mask=in_half)


def mla_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    kv_slots: torch.Tensor,
    latents: torch.Tensor,
) -> torch.Tensor:
    num_tokens, heads, size = q.shape
    num_blocks, block_size, _ = latents.shape
    rank, half = norm.shape[0], cos_sin.shape[1] // 2
    assert q.stride(2) == kv.stride(1) == latents.stride(2) == 1 and cos_sin.is_contiguous(), "rows must be contiguous"
    latent = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    block_h, block_rank = min(HEADS, next_power_of_2(heads)), next_power_of_2(rank)
    mla_write_kernel[(num_tokens, 1 + cdiv(heads, block_h))](
        q, kv, positions, cos_sin, norm, kv_slots, latents, latent, eps, cos_sin.shape[0], num_blocks * block_size,
        q.stride(0), q.stride(1), kv.stride(0), latents.stride(0), latents.stride(1),
        H=heads, D=size, RANK=rank, HALF=half, BS=block_size, BLOCK_H=block_h, BLOCK_RANK=block_rank,
        BLOCK_HALF=next_power_of_2(half), num_warps=min(4, max(1, block_rank // 256)), **launch_early(q.device),
    )  # fmt: skip
    return latent
