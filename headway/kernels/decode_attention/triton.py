"""Triton kernel of ``decode_attention``: one program per KV head, row and split of the row's keys.

A program asks for its first keys, then norms and rotates its queries while they come. The last split in use also makes the
new key and value, writes them and attends to them. Splits leave partial results; whoever finishes last of a row and KV
head weighs them together, so there is no second launch.

Online softmax: Milakov and Gimelshein 2018; split-KV: Flash-Decoding, 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.paged_attention.triton import LOG2E, attend, capped, fold, load_row, split_plan
from headway.kernels.skinny_linear.triton import normed

TOGETHER = tl.constexpr(8)
"""Partial results weighed at once."""


@triton.jit
def turned(at, norm_ptr, angles, keep, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads at ``at`` ([M, 1] pointers), normed and rotated: [M, D], rounded as ``rope_kv_write`` rounds."""
    HALF: tl.constexpr = D // 2
    dim = tl.arange(0, D)
    other = (dim + HALF) % D
    x = tl.load(at + dim[None, :], mask=keep[:, None], other=0.0)
    partner = tl.load(at + other[None, :], mask=keep[:, None], other=0.0)
    cos = tl.load(angles + dim % HALF)[None, :]
    sin = tl.load(angles + HALF + dim % HALF)[None, :]
    if NORM:
        wide = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
        x = normed(x, rstd, tl.load(norm_ptr + dim)[None, :])
        partner = normed(partner, rstd, tl.load(norm_ptr + other)[None, :])
    sin = tl.where((dim < HALF)[None, :], -sin, sin)
    return (x.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def combine(partial_ptr, top_ptr, out_ptr, row, kv_head, used, num_splits, H: tl.constexpr, GROUP: tl.constexpr,
            D: tl.constexpr):  # fmt: skip
    """Weigh the partial results of one row and KV head, and write its heads."""
    dim = tl.arange(0, D)
    for member in range(GROUP):
        base = (row.to(tl.int64) * H + kv_head * GROUP + member) * num_splits
        best = float("-inf")
        total = 0.0
        acc = tl.zeros([D], tl.float32)
        for start in range(0, used, TOGETHER):
            split = start + tl.arange(0, TOGETHER)
            keep = split < used
            top = tl.load(top_ptr + base + split, mask=keep, other=float("-inf"))
            part = tl.load(partial_ptr + (base + split)[:, None] * D + dim[None, :], mask=keep[:, None], other=0.0)
            new_best = tl.maximum(best, tl.max(top, axis=0))
            weights = tl.exp2(top - new_best)
            decay = tl.exp2(best - new_best)
            total = total * decay + tl.sum(weights, axis=0)
            acc = acc * decay + tl.sum(part * weights[:, None], axis=0)
            best = new_best
        place = (row.to(tl.int64) * H + kv_head * GROUP + member) * D + dim
        tl.store(out_ptr + place, (acc / total).to(out_ptr.dtype.element_ty))


@triton.jit
def write_new_token(
    q, source, k_head, v_head, k_norm_ptr, angles, kv_slot, num_kv_slots, eps, kv_head, block_stride, offset_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """Store the new token's key and value in the cache; returns (q . key [M], value f32 [1, D])."""
    dim = tl.arange(0, D)[None, :]
    one = tl.zeros([1], tl.int32)
    new_k = turned(source + (H + kv_head + one)[:, None] * D, k_norm_ptr, angles, one == 0, eps, D, K_NORM)
    new_v = tl.load(source + (H + KH + kv_head) * D + dim)
    write = (kv_slot >= 0) & (kv_slot < num_kv_slots)
    kv_slot = tl.where(write, kv_slot, 0)
    at = (kv_slot // BS).to(tl.int64) * block_stride + (kv_slot % BS) * offset_stride + dim
    tl.store(k_head + at, new_k, mask=(dim < D) & write)
    tl.store(v_head + at, new_v, mask=(dim < D) & write)
    return tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1), new_v.to(tl.float32)


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "min_tiles", "window", "num_blocks", "num_slots", "num_positions"],
    do_not_specialize_on_alignment=["row_slots_ptr", "seq_lens_ptr", "kv_slots_ptr", "tables_ptr", "finished_ptr"],
)
def decode_attention_kernel(
    qkv_ptr,  # [R, (H + 2 * KH) * D]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    out_ptr,  # [R, H * D]
    partial_ptr,  # f32 [R, H, num_splits, D]
    top_ptr,  # f32 [R, H, num_splits], base-2 log of the split's sum of weights
    finished_ptr,  # [R, KH]
    cos_sin_ptr,  # f32 [num_positions, D]
    q_norm_ptr,  # [D] when Q_NORM
    k_norm_ptr,
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    seq_lens_ptr,
    kv_slots_ptr,
    num_rows, num_slots, num_blocks, table_width, num_positions, num_splits, min_tiles, eps, scale, window, soft_cap,
    qkv_stride, block_stride, offset_stride, head_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = H // KH
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    slot, length = load_row(row, num_rows, row_slots_ptr, seq_lens_ptr, num_slots, table_width * BS)
    past = tl.maximum(length - 1, 0)  # keys in the cache
    if WINDOWED:
        window -= 1  # of which one is the new token
    first, tiles, share, used = split_plan(past, window, min_tiles, num_splits, BLOCK_N, WINDOWED)
    used = tl.maximum(used, 1)
    if split >= used:
        return
    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, D)[None, :]
    head = kv_head * GROUP + member
    keep = (member < GROUP)[:, None] & (dim < D)
    out = out_ptr + (row.to(tl.int64) * H + head[:, None]) * D + dim
    if length == 0:
        tl.store(out, tl.zeros([BLOCK_M, D], out_ptr.dtype.element_ty), mask=keep)
        return

    begin = (first + split * share) * BLOCK_N
    end = tl.minimum((first + tl.minimum(split * share + share, tiles)) * BLOCK_N, past)
    table = tables_ptr + slot.to(tl.int64) * table_width
    position = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + position // BS, mask=position < end, other=0)
    block = tl.where((block >= 0) & (block < num_blocks), block, 0).to(tl.int64)
    k_head = k_ptr + kv_head * head_stride
    v_head = v_ptr + kv_head * head_stride
    place = (block * block_stride + (position % BS) * offset_stride)[:, None] + dim
    seen = position < end
    k = tl.load(k_head + place, mask=seen[:, None], other=0.0)
    v = tl.load(v_head + place, mask=seen[:, None], other=0.0)

    source = qkv_ptr + row.to(tl.int64) * qkv_stride
    angles = cos_sin_ptr + tl.minimum(past, num_positions - 1).to(tl.int64) * D
    q = turned(source + head[:, None] * D, q_norm_ptr, angles, member < GROUP, eps, D, Q_NORM)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if split == used - 1:  # the new token is the first key it sees
        logit, new_v = write_new_token(
            q, source, k_head, v_head, k_norm_ptr, angles, tl.load(kv_slots_ptr + row), num_blocks * BS, eps, kv_head,
            block_stride, offset_stride, H, KH, D, BS, K_NORM,
        )  # fmt: skip
        top = capped(logit, scale, soft_cap) if CAPPED else logit * (scale * LOG2E)
        total += 1.0
        acc += new_v
    seen = tl.broadcast_to(seen[None, :], (BLOCK_M, BLOCK_N))
    if WINDOWED:
        seen = seen & (position > past - 1 - window)[None, :]
    if begin < end:
        acc, total, top = fold(acc, total, top, q, k, v, seen, scale, soft_cap, True, CAPPED, PRECISION)
    acc, total, top = attend(
        acc, total, top, q, tl.zeros([BLOCK_M], tl.int32) + (past - 1), k_head, v_head, table,
        begin + BLOCK_N, end, past, num_blocks, scale, window, soft_cap, block_stride, offset_stride,
        D, BS, BLOCK_N, D, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if used == 1:
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=keep)
        return
    part = (row.to(tl.int64) * H + head) * num_splits + split
    tl.store(partial_ptr + part[:, None] * D + dim, result, mask=keep)
    tl.store(top_ptr + part, top + tl.log2(total), mask=member < GROUP)
    tl.debug_barrier()
    before = tl.atomic_add(finished_ptr + row * KH + kv_head, 1, sem="acq_rel", scope="gpu")
    if before == used - 1:
        tl.debug_barrier()
        tl.store(finished_ptr + row * KH + kv_head, 0)
        combine(partial_ptr, top_ptr, out_ptr, row, kv_head, used, num_splits, H, GROUP, D)
