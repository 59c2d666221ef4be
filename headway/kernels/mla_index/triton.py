"""Triton kernels of ``index_write`` and ``index_scores``: a program of the latter takes one token and every so many tiles of
keys."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms
from headway.kernels.mla_decode.triton import row_of_token
from headway.kernels.rope_kv_write.triton import as_cached
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_math import widened

HEADS = 16
"""Of a program that rotates queries, at most."""
KEYS = 64
"""Of a tile."""
PROGRAMS, LEAST_KEYS = 4, 512
"""A processor's programs; keys of a program at least."""


@triton.jit(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "kv_slots_ptr"],
)
def index_write_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, D]
    positions_ptr,
    cos_sin_ptr,  # [P, 2 * HALF]
    weight_ptr,  # [D]
    bias_ptr,
    kv_slots_ptr,
    keys_ptr,  # [NB, BS, D]
    eps,
    num_positions,
    num_slots,
    q_stride,
    head_stride,
    k_stride,
    block_stride,
    offset_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    slot = tl.load(kv_slots_ptr + token)
    angles = cos_sin_ptr + position.to(tl.int64) * (2 * HALF)
    if section > 0:
        half = tl.arange(0, BLOCK_HALF)
        in_half = half < HALF
        turn_cos = tl.load(angles + half, mask=in_half, other=1.0)[None, :]
        turn_sin = tl.load(angles + HALF + half, mask=in_half, other=0.0)[None, :]
        head = (section - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        keep = (head < H)[:, None] & in_half[None, :]
        at = q_ptr + token * q_stride + head[:, None] * head_stride + half[None, :]
        wait_for_inputs(EARLY)
        low = tl.load(at, mask=keep, other=0.0)
        high = tl.load(at + HALF, mask=keep, other=0.0)
        tl.store(at, (low.to(tl.float32) * turn_cos - high.to(tl.float32) * turn_sin).to(low.dtype), mask=keep)
        tl.store(at + HALF, (high.to(tl.float32) * turn_cos + low.to(tl.float32) * turn_sin).to(low.dtype), mask=keep)
    else:
        dim = tl.arange(0, BLOCK_D)
        inside = dim < D
        rotated = dim < 2 * HALF
        pair = tl.where(dim < HALF, dim + HALF, dim - HALF)  # the other of a pair
        pair = tl.where(rotated, pair, dim)
        cos = tl.load(angles + dim % HALF, mask=rotated, other=1.0)
        sin = tl.load(angles + HALF + dim % HALF, mask=rotated, other=0.0)
        weight = tl.load(weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + dim, mask=inside, other=0.0).to(tl.float32)
        pair_weight = tl.load(weight_ptr + pair, mask=inside, other=0.0).to(tl.float32)
        pair_bias = tl.load(bias_ptr + pair, mask=inside, other=0.0).to(tl.float32)
        write = (slot >= 0) & (slot < num_slots)
        slot = tl.where(write, slot, 0)
        place = keys_ptr + (slot // BS).to(tl.int64) * block_stride + (slot % BS) * offset_stride
        wait_for_inputs(EARLY)
        source = k_ptr + token * k_stride
        x = tl.load(source + dim, mask=inside, other=0.0)
        other = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        mean = tl.sum(wide, axis=0) / D
        apart = tl.where(inside, wide - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(apart * apart, axis=0) / D + eps)
        normed = (apart * rstd * weight + bias).to(x.dtype).to(tl.float32)
        partner = ((other - mean) * rstd * pair_weight + pair_bias).to(x.dtype).to(tl.float32)
        key = normed * cos + tl.where(dim < HALF, -partner, partner) * sin
        tl.store(place + dim, as_cached(key.to(x.dtype), keys_ptr.dtype.element_ty), mask=inside & write)


def index_write(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    kv_slots: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    num_tokens, heads, size = q.shape
    num_blocks, block_size, _ = keys.shape
    half = cos_sin.shape[1] // 2
    assert q.stride(2) == k.stride(1) == keys.stride(2) == 1 and cos_sin.is_contiguous(), "rows must be contiguous"
    block_h = min(HEADS, next_power_of_2(heads))
    index_write_kernel[(num_tokens, 1 + cdiv(heads, block_h))](
        q, k, positions, cos_sin, weight, bias, kv_slots, keys, eps, cos_sin.shape[0], num_blocks * block_size,
        q.stride(0), q.stride(1), k.stride(0), keys.stride(0), keys.stride(1),
        H=heads, D=size, HALF=half, BS=block_size, BLOCK_H=block_h, BLOCK_D=next_power_of_2(size),
        BLOCK_HALF=next_power_of_2(half), num_warps=2, **launch_early(q.device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_blocks", "table_width", "first", "bound"],
    do_not_specialize_on_alignment=["tables_ptr", "row_slots_ptr", "query_start_ptr", "seq_lens_ptr"],
)
def index_scores_kernel(
    q_ptr,  # [N, H, D]
    weights_ptr,  # [N, H]
    keys_ptr,  # [NB, BS, D]
    scores_ptr,  # f32 [N, bound]
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    num_rows,
    num_slots,
    num_blocks,
    table_width,
    first,
    bound,
    scale,
    q_token,
    q_head,
    weights_token,
    block_stride,
    offset_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    nth = tl.program_id(1)
    wait_for_inputs(EARLY)
    row = row_of_token(first + nth, query_start_ptr, num_rows)
    owned = row < num_rows
    end = tl.load(query_start_ptr + row + 1, mask=owned, other=0)
    slot = tl.load(row_slots_ptr + row, mask=owned, other=-1)
    seq_len = tl.load(seq_lens_ptr + row, mask=owned, other=0)
    keys = tl.minimum(seq_len - (end - first - nth) + 1, tl.minimum(bound, table_width * BS))
    if (slot < 0) | (slot >= num_slots) | (seq_len <= 0):
        return
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    at = nth.to(tl.int64)
    q_at = q_ptr + at * q_token + head[:, None] * q_head + dim[None, :]
    q = tl.load(q_at, mask=(head < H)[:, None] & (dim < D)[None, :], other=0.0)
    weights = tl.load(weights_ptr + at * weights_token + head, mask=head < H, other=0.0).to(tl.float32)
    table = tables_ptr + slot.to(tl.int64) * table_width
    for start in range(tl.program_id(0) * BLOCK_N, keys, tl.num_programs(0) * BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < keys
        block = tl.load(table + tl.where(inside, key, 0) // BS, mask=inside, other=0)
        block = tl.where((block >= 0) & (block < num_blocks), block, 0)
        place = keys_ptr + block.to(tl.int64) * block_stride + (tl.where(inside, key, 0) % BS) * offset_stride
        k = tl.load(place[:, None] + dim[None, :], mask=inside[:, None] & (dim < D)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee") * scale
        total = tl.sum(tl.maximum(s, 0.0) * weights[:, None], axis=0)
        tl.store(scores_ptr + at * bound + key, total, mask=inside)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    first: int,
    scale: float,
    max_seq_len_bound: int,
) -> torch.Tensor:
    number, heads, size = q.shape
    num_blocks, block_size, _ = keys.shape
    assert q.stride(2) == weights.stride(1) == keys.stride(2) == 1 and block_tables.is_contiguous(), (
        "rows must be contiguous"
    )
    scores = torch.empty((number, max_seq_len_bound), dtype=torch.float32, device=q.device)
    programs = min(cdiv(PROGRAMS * num_sms(q.device), max(number, 1)), cdiv(max_seq_len_bound, LEAST_KEYS))
    index_scores_kernel[(max(programs, 1), number)](
        q, weights, keys, scores, block_tables, row_slots, query_start, seq_lens, row_slots.shape[0],
        block_tables.shape[0], num_blocks, block_tables.shape[1], first, max_seq_len_bound, scale,
        q.stride(0), q.stride(1), weights.stride(0), keys.stride(0), keys.stride(1),
        H=heads, D=size, BS=block_size, BLOCK_H=max(16, next_power_of_2(heads)), BLOCK_N=KEYS,
        BLOCK_D=max(16, next_power_of_2(size)), num_warps=4, num_stages=3, **launch_early(q.device),
    )  # fmt: skip
    return scores
