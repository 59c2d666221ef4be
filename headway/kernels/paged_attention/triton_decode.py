"""Decode attention for Hopper: the first keys and values are in shared memory before the projections are there.

A program takes one row, KV head and split of the row's keys. It starts copying its first ``STAGES`` tiles, which earlier steps
wrote, then waits for the kernel before it (see ``triton_early``); norms and rotates its queries and the newest key, which it
writes to the cache if the newest token is its own; then goes through its tiles. What the shared memory holds by then is
read while the linear layers before, which are short of work rather than of bandwidth, still run.

Keys are the rows of the products and queries their columns (S^T = K Q^T, O^T = V^T P^T): eight columns serve the queries of a
KV head, where a product with queries as rows has sixteen. Each warp has its own 16 keys of a tile and its own softmax over
them, so warps exchange nothing until the end; that is a product with a batch of ``WARPS``.

This is Gluon, Triton's lower-level language: Triton itself copies nothing to shared memory ahead of the loop that reads it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.paged_attention.triton_copy import copy_keys, copy_layout, load_blocks

LOG2E = gl.constexpr(1.4426950408889634)
KEYS = gl.constexpr(16)
"""Keys of a warp in a tile: the rows of one product."""
QUERIES = gl.constexpr(8)
"""Columns of a product; a KV head may have fewer queries."""
CHUNK = gl.constexpr(8)
"""Splits that are weighed at a time."""


@gluon.constexpr_function
def weigh_layout(size, warps):
    """Threads over [CHUNK, queries, D]: all splits of an element in one thread."""
    return gl.BlockedLayout([8, 1, size // 32], [1, 1, 32], [1, warps, 1], [2, 1, 0])


@gluon.jit
def cubed(x, first: gl.constexpr, second: gl.constexpr):
    """A vector as a tensor of three dimensions, by two ``expand_dims``."""
    return gl.expand_dims(gl.expand_dims(x, first), second)


@gluon.jit
def scaled(x, rstd, weight):
    """RMS norm with ``rms_norm``'s rounding: normalise, round, times weight, round."""
    return ((x.to(gl.float32) * rstd).to(x.dtype).to(gl.float32) * weight.to(gl.float32)).to(x.dtype)


@gluon.jit
def turned(at, keep, angles, norm_ptr, dim, eps, D: gl.constexpr, NORM: gl.constexpr):
    """Both halves [WARPS, D / 2, queries or 1] of heads, normed and rotated, rounded as ``rope_kv_write``.

    ``at``: pointers to the first halves. ``dim``: [1, D / 2, 1]. All in the layout of a second factor.
    """
    low = gl.load(at, mask=keep, other=0.0)
    high = gl.load(at + D // 2, mask=keep, other=0.0)
    cos = gl.load(angles + dim)
    sin = gl.load(angles + D // 2 + dim)
    if NORM:
        low_weight = gl.load(norm_ptr + dim)
        high_weight = gl.load(norm_ptr + D // 2 + dim)
        a = low.to(gl.float32)
        b = high.to(gl.float32)
        rstd = gl.rsqrt(gl.sum(a * a + b * b, axis=1) / D + eps)
        low = scaled(low, gl.expand_dims(rstd, 1), low_weight)
        high = scaled(high, gl.expand_dims(rstd, 1), high_weight)
    a = low.to(gl.float32)
    b = high.to(gl.float32)
    return (a * cos - b * sin).to(low.dtype), (b * cos + a * sin).to(low.dtype)


@gluon.jit
def base_2(logits, scale, soft_cap, CAPPED: gl.constexpr):
    """Scaled logits, capped with CAPPED, over ln 2."""
    if CAPPED:  # tanh(x) = 1 - 2 / (e^2x + 1)
        twice = gl.exp2(logits * (2.0 * LOG2E * scale / soft_cap))
        return (1.0 - 2.0 / (twice + 1.0)) * (soft_cap * LOG2E)
    else:
        return logits * (scale * LOG2E)


@gluon.jit
def split_plan(seq_len, window, min_tiles, num_splits, BLOCK_N: gl.constexpr, WINDOWED: gl.constexpr):
    """(first tile, number of tiles, tiles per split, splits in use) of a row, from its true length."""
    first = 0
    if WINDOWED:
        first = gl.maximum(seq_len - window, 0) // BLOCK_N
    tiles = (seq_len + BLOCK_N - 1) // BLOCK_N - first
    wanted = gl.maximum(gl.minimum((tiles + min_tiles - 1) // min_tiles, num_splits), 1)
    share = gl.maximum((tiles + wanted - 1) // wanted, 1)
    return first, tiles, share, (tiles + share - 1) // share


@gluon.jit
def weigh_splits(out_ptr, partial_ptr, top_ptr, first_head, used, num_splits,
                 GROUP: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Outputs of the query heads from ``first_head`` (counted over all rows) on, from their splits' partial results."""
    LAYOUT: gl.constexpr = weigh_layout(D, WARPS)
    FLAT: gl.constexpr = gl.SliceLayout(0, LAYOUT)  # [queries, D]
    part = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1)
    member = gl.expand_dims(gl.arange(0, QUERIES, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    dim = cubed(gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0, 0)
    best = gl.full([QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    total = gl.zeros([QUERIES], gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    acc = gl.zeros([QUERIES, D], gl.float32, layout=FLAT)
    for start in range(0, used, CHUNK):
        at = (first_head + member) * num_splits + start + part
        keep = (member < GROUP) & (start + part < used)
        top = gl.load(top_ptr + at, mask=keep, other=float("-inf"))
        parts = gl.load(partial_ptr + gl.expand_dims(at, 2) * D + dim, mask=gl.expand_dims(keep, 2), other=0.0)
        new_best = gl.maximum(best, gl.max(top, axis=0))
        shift = gl.where(new_best == float("-inf"), 0.0, new_best)  # queries beyond the group
        weights = gl.exp2(top - gl.expand_dims(shift, 0))
        decay = gl.exp2(best - shift)
        total = total * decay + gl.sum(weights, axis=0)
        acc *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, FLAT)), 1)
        acc += gl.sum(parts * gl.expand_dims(weights, 2), axis=0)
        best = new_best
    total = gl.convert_layout(gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, FLAT))
    row = first_head + gl.expand_dims(gl.arange(0, QUERIES, layout=gl.SliceLayout(1, FLAT)), 1)
    at = row * D + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, FLAT)), 0)
    result = acc / gl.expand_dims(total, 1)
    gl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=row < first_head + GROUP)


@gluon.jit
def merge_warps(o, top, total, LAYOUT: gl.constexpr):
    """(output [D, QUERIES], base-2 log of its sum of weights [QUERIES]) of the warps' softmaxes."""
    top = gl.convert_layout(top, gl.SliceLayout(1, LAYOUT))  # [WARPS, QUERIES]
    total = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
    o = gl.convert_layout(o, LAYOUT)  # [WARPS, D, QUERIES]
    best = gl.max(top, axis=0)
    shift = gl.where(best == float("-inf"), 0.0, best)
    weights = gl.exp2(top - gl.expand_dims(shift, 0))
    total = gl.sum(total * weights, axis=0)
    o = gl.sum(o * gl.expand_dims(weights, 1), axis=0)
    safe = gl.convert_layout(gl.where(total > 0.0, total, 1.0), gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    return o / gl.expand_dims(safe, 0), gl.convert_layout(
        shift + gl.log2(total), gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))
    )


@gluon.jit
def fold(o, total, top, q, k_smem, v_smem, seen, scale, soft_cap, CAPPED: gl.constexpr, S: gl.constexpr):
    """One tile of keys and values [WARPS, KEYS, D] into each warp's softmax. ``seen``: [WARPS, KEYS]."""
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    WARPS: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[2]
    HALF: gl.constexpr = D // 2
    low, high = q
    s = gl.zeros([WARPS, KEYS, QUERIES], gl.float32, layout=S)
    s = mma_v2(k_smem.slice(0, HALF, 2).load(A), low, s)
    s = mma_v2(k_smem.slice(HALF, HALF, 2).load(A), high, s)
    if CAPPED:
        s = base_2(s, scale, soft_cap, CAPPED)
        factor = 1.0
    else:  # folded into the exponent
        factor = scale * LOG2E
    s = gl.where(gl.expand_dims(seen, 2), s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=1) * factor)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a warp that has seen nothing yet
    weights = gl.exp2(s * factor - gl.expand_dims(shift, 1))
    decay = gl.exp2(top - shift)
    total = total * decay + gl.sum(weights, axis=1)
    p = gl.convert_layout(weights.to(low.dtype), B)
    o = mma_v2(v_smem.permute((0, 2, 1)).load(A), p, o * gl.expand_dims(decay, 1))
    return o, total, new_top


@gluon.jit
def cache_place(kv_slot, mine, num_blocks, block_stride, OFFSET_STRIDE: gl.constexpr, BS: gl.constexpr):
    """(whether to write the newest key and value, where in a head's cache)."""
    write = mine & (kv_slot >= 0) & (kv_slot < num_blocks * BS)
    slot = gl.where(write, kv_slot, 0)
    return write, (slot // BS).to(gl.int64) * block_stride + (slot % BS) * OFFSET_STRIDE


@gluon.jit
def take_row(
    row_ptr, angles, q_norm_ptr, k_norm_ptr, k_head, v_head, place, kv_head, eps,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, S: gl.constexpr,
    Q_NORM: gl.constexpr, K_NORM: gl.constexpr,
):  # fmt: skip
    """From a row of projections: both halves of its queries as second factors, [WARPS, QUERIES] logits of its own key, and
    its value [WARPS, D, 1]. Key and value are written to the cache at ``place``."""
    B: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    half = cubed(gl.arange(0, D // 2, layout=gl.SliceLayout(1, gl.SliceLayout(0, B))), 1, 0)
    warp = cubed(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, B))), 1, 2)
    member = cubed(gl.arange(0, QUERIES, layout=gl.SliceLayout(0, gl.SliceLayout(0, B))), 0, 0)
    q_at = row_ptr + (kv_head * GROUP + member) * D + half + 0 * warp
    low, high = turned(q_at, member < GROUP, angles, q_norm_ptr, half, eps, D, Q_NORM)
    new_at = half + 0 * warp
    k_at = row_ptr + (H + kv_head) * D + new_at
    k_low, k_high = turned(k_at, half < D, angles, k_norm_ptr, half, eps, D, K_NORM)
    dim = cubed(gl.arange(0, D, layout=gl.SliceLayout(1, gl.SliceLayout(0, S))), 1, 0)
    v_warp = cubed(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S))), 1, 2)
    v_at = dim + 0 * v_warp
    new_v = gl.load(row_ptr + (H + H // GROUP + kv_head) * D + v_at)
    write, at = place
    gl.store(k_head + at + new_at, k_low, mask=write & (warp == 0))
    gl.store(k_head + at + D // 2 + new_at, k_high, mask=write & (warp == 0))
    gl.store(v_head + at + v_at, new_v, mask=write & (v_warp == 0))
    products = low.to(gl.float32) * k_low.to(gl.float32) + high.to(gl.float32) * k_high.to(gl.float32)
    return (low, high), gl.convert_layout(gl.sum(products, axis=1), gl.SliceLayout(1, S)), new_v


@gluon.jit
def finish(
    o, top, total, out_ptr, partial_ptr, top_ptr, arrival, first_head, split, used, num_splits,
    GROUP: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store the outputs of a row that is not split, else this split's; the split that is done last weighs them all."""
    MERGED: gl.constexpr = gl.BlockedLayout([WARPS, D // 32, 1], [1, 32, 1], [1, 1, WARPS], [1, 2, 0])
    FLAT: gl.constexpr = gl.SliceLayout(0, MERGED)  # [D, QUERIES]
    result, weight = merge_warps(o, top, total, MERGED)
    head = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, FLAT))
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(1, FLAT)), 1)
    keep = gl.expand_dims(head < GROUP, 0)
    if used <= 1:
        at = gl.expand_dims(first_head + head, 0) * D + dim
        gl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        part = (first_head + head) * num_splits + split
        gl.store(partial_ptr + gl.expand_dims(part, 0) * D + dim, result, mask=keep)
        gl.store(top_ptr + part, weight, mask=head < GROUP)
        gl.thread_barrier()  # all threads' parts are stored before one thread says so
        if gl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
            gl.store(arrival, 0)
            weigh_splits(out_ptr, partial_ptr, top_ptr, first_head, used, num_splits, GROUP, D, WARPS)


@gluon.jit(
    do_not_specialize=["num_splits", "min_tiles", "window", "num_blocks", "num_slots", "num_positions"],
    do_not_specialize_on_alignment=[
        "row_slots_ptr", "seq_lens_ptr", "tables_ptr", "arrivals_ptr", "positions_ptr", "kv_slots_ptr",
    ],
)  # fmt: skip
def early_decode_kernel(
    qkv_ptr,  # [R, (H + 2 * KH) * D]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    out_ptr,  # [R, H, D]
    partial_ptr,  # f32 [R, H, num_splits, D]
    top_ptr,  # f32 [R, H, num_splits], base-2 log of the split's sum of weights
    arrivals_ptr,  # int32 [R, KH], zero before and after: splits of the row that are done
    tables_ptr,  # [S, table_width]
    row_slots_ptr, seq_lens_ptr, positions_ptr,  # [R]
    cos_sin_ptr,  # [num_positions, D]
    q_norm_ptr, k_norm_ptr,  # [D]
    kv_slots_ptr,  # [R]
    num_slots, num_blocks, num_positions, table_width, num_splits, min_tiles,
    scale, window, soft_cap, eps,
    qkv_stride, block_stride, head_stride,
    OFFSET_STRIDE: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BS: gl.constexpr,
    STAGES: gl.constexpr,  # tiles in shared memory
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid: KV heads, rows, splits. A row that needs one split writes its output, else partial results."""
    if EARLY:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_N: gl.constexpr = WARPS * KEYS
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    COPY: gl.constexpr = copy_layout(WARPS, D, BLOCK_N)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    kv_head = gl.program_id(0)
    row = gl.program_id(1)
    split = gl.program_id(2)
    slot = gl.load(row_slots_ptr + row)
    known = (slot >= 0) & (slot < num_slots)
    seq_len = gl.where(known, gl.minimum(gl.load(seq_lens_ptr + row), table_width * BS), 0)
    first, tiles, share, used = split_plan(seq_len, window, min_tiles, num_splits, BLOCK_N, WINDOWED)
    if split >= gl.maximum(used, 1):
        if EARLY:
            gdc_wait()
        return
    newest = seq_len - 1
    begin = first + split * share  # tiles, as follows
    limit = gl.minimum(
        (begin + gl.minimum(share, tiles - split * share)) * BLOCK_N, newest
    )  # the newest comes from qkv
    count = gl.maximum(limit - begin * BLOCK_N + BLOCK_N - 1, 0) // BLOCK_N
    cache = (tables_ptr + gl.where(known, slot, 0).to(gl.int64) * table_width, limit, num_blocks, block_stride)
    k_head, v_head = k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    for i in gl.static_range(STAGES):
        block = load_blocks(cache, begin + i, BS, BLOCK_N, COPY)
        copy_keys(k_smem.index(i), k_head, block, cache, begin + i, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
        copy_keys(v_smem.index(i), v_head, block, cache, begin + i, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
        async_copy.commit_group()
    ahead = load_blocks(cache, begin + STAGES, BS, BLOCK_N, COPY)
    kv_slot = gl.load(kv_slots_ptr + row)
    position = gl.minimum(gl.maximum(gl.load(positions_ptr + row), 0), num_positions - 1)
    if EARLY:
        gdc_wait()
    mine = split == used - 1  # the newest token is the last of the last split; its first warp takes it
    angles = cos_sin_ptr + position.to(gl.int64) * D
    place = cache_place(kv_slot, mine, num_blocks, block_stride, OFFSET_STRIDE, BS)
    q, logits, new_v = take_row(
        qkv_ptr + row.to(gl.int64) * qkv_stride, angles, q_norm_ptr, k_norm_ptr, k_head, v_head, place, kv_head, eps,
        H, GROUP, D, WARPS, S, Q_NORM, K_NORM,
    )  # fmt: skip
    v_warp = cubed(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S))), 1, 2)
    its = mine & (gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, S))), 1) == 0)
    top = gl.where(its, base_2(logits, scale, soft_cap, CAPPED), float("-inf"))
    total = gl.where(its, logits * 0.0 + 1.0, 0.0)
    o = gl.zeros([WARPS, D, QUERIES], gl.float32, layout=S) + gl.where(mine & (v_warp == 0), new_v.to(gl.float32), 0.0)
    key = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S))), 1) * KEYS
    key += gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, S))), 0)
    for i in range(count):
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()  # all warps see the copies
        at = (begin + i) * BLOCK_N + key
        seen = at < limit
        if WINDOWED:
            seen = seen & (at > newest - window)
        k_tile = k_smem.index(i % STAGES).reshape([WARPS, KEYS, D])
        v_tile = v_smem.index(i % STAGES).reshape([WARPS, KEYS, D])
        o, total, top = fold(o, total, top, q, k_tile, v_tile, seen, scale, soft_cap, CAPPED, S)
        gl.thread_barrier()  # all warps have read what is overwritten now
        next_tile = begin + i + STAGES
        copy_keys(k_smem.index(i % STAGES), k_head, ahead, cache, next_tile, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
        copy_keys(v_smem.index(i % STAGES), v_head, ahead, cache, next_tile, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
        async_copy.commit_group()
        ahead = load_blocks(cache, next_tile + 1, BS, BLOCK_N, COPY)

    async_copy.wait_group(0)
    first_head = row.to(gl.int64) * H + kv_head * GROUP
    arrival = arrivals_ptr + row * (H // GROUP) + kv_head
    finish(o, top, total, out_ptr, partial_ptr, top_ptr, arrival, first_head, split, used, num_splits, GROUP, D, WARPS)
