"""Triton kernel of decode attention, split over keys: for ``paged_attention`` and, with ``TURN``, for ``decode_attention``.

With ``TURN`` it takes the projections themselves: each program norms and rotates its queries, and the one whose split ends
with the newest token also writes that token's key and value. It folds them in from registers, so all that it reads from
the cache is of earlier steps and may be read before the projections are there.

A row's splits are weighed by the program that is done last, in fixed order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.paged_attention.triton import attend, base_2, fold, load_row
from headway.kernels.rope_kv_write.triton import load_norm, scaled
from headway.kernels.triton_early import start_next, wait_for_inputs


@triton.jit
def load_stored(
    k_ptr, v_ptr, table, position, stored, num_blocks, block_stride, offset_stride,
    D: tl.constexpr, BS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(keys, values) [BLOCK_N, BLOCK_D] of the positions below ``stored``, zeros for others."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    there = position < stored
    block = tl.load(table + position // BS, mask=there, other=0)
    block = tl.where((block >= 0) & (block < num_blocks), block, 0).to(tl.int64)
    place = (block * block_stride + (position % BS) * offset_stride)[:, None] + dim
    keep = there[:, None] & (dim < D)
    return tl.load(k_ptr + place, mask=keep, other=0.0), tl.load(v_ptr + place, mask=keep, other=0.0)


@triton.jit
def load_turn(
    position_at, cos_sin_ptr, q_norm_ptr, k_norm_ptr, num_positions,
    D: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """What turns projections into queries and keys: (cos, sin) [1, D / 2] and the halves of both norms' weights."""
    half = tl.arange(0, D // 2)
    position = tl.minimum(tl.maximum(tl.load(position_at), 0), num_positions - 1)
    at = cos_sin_ptr + position.to(tl.int64) * D + half[None, :]
    return (
        tl.load(at),
        tl.load(at + D // 2),
        load_norm(q_norm_ptr, half, half < D, Q_NORM),
        load_norm(q_norm_ptr + D // 2, half, half < D, Q_NORM),
        load_norm(k_norm_ptr, half, half < D, K_NORM),
        load_norm(k_norm_ptr + D // 2, half, half < D, K_NORM),
    )


@triton.jit
def turned_halves(at, keep, cos, sin, first_norm, second_norm, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves [N, D / 2] of the heads that begin at ``at`` [N, D / 2], normed and rotated, rounded as ``rope_kv_write``."""
    first = tl.load(at, mask=keep, other=0.0)
    second = tl.load(at + D // 2, mask=keep, other=0.0)
    if NORM:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / D + eps)
        first = scaled(first, rstd, first_norm)
        second = scaled(second, rstd, second_norm)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def turned_projections(
    row_ptr, head, real, kv_head, turn, eps,
    H: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """From a row of projections: queries [BLOCK_M, D] of ``real`` heads, the new key's halves and value, their logits."""
    cos, sin, q_first, q_second, k_first, k_second = turn
    half = tl.arange(0, D // 2)[None, :]
    low, high = turned_halves(
        row_ptr + head[:, None] * D + half, real[:, None], cos, sin, q_first, q_second, eps, D, Q_NORM
    )
    k_at = row_ptr + (H + kv_head) * D + half
    k_low, k_high = turned_halves(k_at, half < D, cos, sin, k_first, k_second, eps, D, K_NORM)
    new_v = tl.load(row_ptr + (H + H // GROUP + kv_head) * D + tl.arange(0, D))
    q = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BLOCK_M, D))
    logits = tl.sum(low.to(tl.float32) * k_low.to(tl.float32) + high.to(tl.float32) * k_high.to(tl.float32), axis=1)
    return q, (k_low, k_high), new_v, logits


@triton.jit
def write_newest(
    k_ptr, v_ptr, new_k, new_v, kv_slot, mine, num_blocks, block_stride, offset_stride,
    D: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store a head's new key and value at its place in the cache, if it is ``mine`` to do and has one."""
    k_low, k_high = new_k
    write = mine & (kv_slot >= 0) & (kv_slot < num_blocks * BS)
    slot = tl.where(write, kv_slot, 0)
    at = (slot // BS).to(tl.int64) * block_stride + (slot % BS) * offset_stride
    half = tl.arange(0, D // 2)[None, :]
    tl.store(k_ptr + at + half, k_low, mask=write)
    tl.store(k_ptr + at + D // 2 + half, k_high, mask=write)
    tl.store(v_ptr + at + tl.arange(0, D), new_v, mask=write)


@triton.jit
def split_plan(seq_len, window, min_tiles, num_splits, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """(first tile, number of tiles, tiles per split, splits in use) of a decode row, from its true length."""
    first = 0
    if WINDOWED:
        first = tl.maximum(seq_len - window, 0) // BLOCK_N
    tiles = (seq_len + BLOCK_N - 1) // BLOCK_N - first
    wanted = tl.maximum(tl.minimum((tiles + min_tiles - 1) // min_tiles, num_splits), 1)
    share = tl.maximum((tiles + wanted - 1) // wanted, 1)
    return first, tiles, share, (tiles + share - 1) // share


@triton.jit
def last_to_arrive(arrivals, used):
    """Whether all other splits are done; the counter is zero again then."""
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == used - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def weigh_splits(
    out_ptr, partial_ptr, top_ptr, first_head, used, num_splits,
    GROUP: tl.constexpr, D: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Outputs of the query heads from ``first_head`` (counted over all rows) on, from the partial results of their splits."""
    CHUNK: tl.constexpr = 32 // MEMBERS if MEMBERS < 16 else 2
    member = tl.arange(0, MEMBERS)
    head = first_head + member
    dim = tl.arange(0, BLOCK_D)
    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, BLOCK_D], tl.float32)
    for start in range(0, used, CHUNK):
        split = start + tl.arange(0, CHUNK)
        keep = (member < GROUP)[:, None] & (split < used)[None, :]
        at = head[:, None] * num_splits + split[None, :]
        top = tl.load(top_ptr + at, mask=keep, other=float("-inf"))
        at_part = partial_ptr + at[:, :, None] * D + dim[None, None, :]
        part = tl.load(at_part, mask=keep[:, :, None] & (dim < D)[None, None, :], other=0.0)
        new_best = tl.maximum(best, tl.max(top, axis=1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # members beyond the group
        weights = tl.exp2(top - shift[:, None])
        decay = tl.exp2(best - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.sum(part * weights[:, :, None], axis=1)
        best = new_best
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    keep = (member < GROUP)[:, None] & (dim < D)[None, :]
    tl.store(out_ptr + head[:, None] * D + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "min_tiles", "window", "num_blocks", "num_slots", "num_positions"],
    do_not_specialize_on_alignment=[
        "row_slots_ptr",
        "seq_lens_ptr",
        "tables_ptr",
        "arrivals_ptr",
        "positions_ptr",
        "kv_slots_ptr",
    ],
)
def decode_kernel(
    q_ptr,  # [T, H, D], for TURN [T, (H + 2 * KH) * D]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    out_ptr,  # [T, H, D]
    partial_ptr,  # f32 [R, H, num_splits, D]
    top_ptr,  # f32 [R, H, num_splits], base-2 log of the split's sum of weights
    arrivals_ptr,  # int32 [R, KH], zero before and after: splits of the row that are done
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    seq_lens_ptr,
    positions_ptr,  # [T], and what follows is for TURN only
    cos_sin_ptr,  # [num_positions, D]
    q_norm_ptr, k_norm_ptr,  # [D]
    kv_slots_ptr,  # [T]
    num_rows, num_slots, num_blocks, num_positions, table_width, num_splits, min_tiles,
    scale, window, soft_cap, eps,
    q_stride, block_stride, offset_stride, head_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MEMBERS: tl.constexpr,  # GROUP, rounded up
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    TURN: tl.constexpr,  # D is a power of two then
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HOLD: tl.constexpr,  # with TURN: fetch the first tile before the wait
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per KV head, row and split. A row that needs one split writes its output, else partial results."""
    start_next(EARLY)
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    slot, seq_len = load_row(row, num_rows, row_slots_ptr, seq_lens_ptr, num_slots, table_width * BS)
    first, tiles, share, used = split_plan(seq_len, window, min_tiles, num_splits, BLOCK_N, WINDOWED)
    if split >= tl.maximum(used, 1):
        wait_for_inputs(EARLY)
        return

    dim = tl.arange(0, BLOCK_D)
    table = tables_ptr + slot.to(tl.int64) * table_width
    k_head = k_ptr + kv_head * head_stride
    v_head = v_ptr + kv_head * head_stride
    newest = seq_len - 1
    stored = seq_len  # keys that the cache holds
    if TURN:
        stored = newest
    begin = (first + split * share) * BLOCK_N
    end = tl.minimum((first + tl.minimum(split * share + share, tiles)) * BLOCK_N, stored)
    member = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    keep = (member < GROUP)[:, None] & (dim < D)[None, :]
    q_row = q_ptr + row.to(tl.int64) * q_stride
    q_position = tl.zeros([BLOCK_M], tl.int32) + newest
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if TURN:
        turn = load_turn(positions_ptr + row, cos_sin_ptr, q_norm_ptr, k_norm_ptr, num_positions, D, Q_NORM, K_NORM)
        kv_slot = tl.load(kv_slots_ptr + row)
        held = begin + tl.arange(0, BLOCK_N)
        if HOLD:
            k, v = load_stored(
                k_head, v_head, table, held, stored, num_blocks, block_stride, offset_stride, D, BS, BLOCK_D
            )
        wait_for_inputs(EARLY)
        mine = split == used - 1  # the newest token is the last of the last split
        q, new_k, new_v, logits = turned_projections(
            q_row, head, member < GROUP, kv_head, turn, eps, H, GROUP, BLOCK_M, D, Q_NORM, K_NORM
        )
        write_newest(k_head, v_head, new_k, new_v, kv_slot, mine, num_blocks, block_stride, offset_stride, D, BS)
        top = tl.where(mine, base_2(logits, scale, soft_cap, CAPPED), top)
        total = tl.where(mine, 1.0, total)
        acc = tl.where(mine, acc + new_v.to(tl.float32)[None, :], acc)
        if HOLD:
            acc, total, top = fold(
                acc, total, top, q, q_position, k, v, held, stored, scale, window, soft_cap,
                True, WINDOWED, CAPPED, PRECISION,
            )  # fmt: skip
            begin += BLOCK_N
    else:
        wait_for_inputs(EARLY)
        q = tl.load(q_row + head[:, None] * D + dim[None, :], mask=keep, other=0.0)
    acc, total, top = attend(
        acc, total, top, q, q_position, k_head, v_head, table,
        begin, end, stored, num_blocks, scale, window, soft_cap, block_stride, offset_stride,
        D, BS, BLOCK_N, BLOCK_D, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if used <= 1:
        at = row.to(tl.int64) * (H * D) + head[:, None] * D + dim[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        first_head = row.to(tl.int64) * H + kv_head * GROUP
        part = (first_head + member) * num_splits + split
        tl.store(partial_ptr + part[:, None] * D + dim[None, :], result, mask=keep)
        tl.store(top_ptr + part, top + tl.log2(total), mask=member < GROUP)
        tl.debug_barrier()  # all threads' parts are stored before one thread says so
        if last_to_arrive(arrivals_ptr + row * (H // GROUP) + kv_head, used):
            weigh_splits(out_ptr, partial_ptr, top_ptr, first_head, used, num_splits, GROUP, D, MEMBERS, BLOCK_D)
