"""Decode attention for Hopper: the first keys and values are in shared memory before the projections are there.

A program takes one row, KV head and split of the row's keys. It starts copying its first ``STAGES`` tiles, which earlier steps
wrote, then waits for the kernel before it (see ``triton_early``); norms and rotates its queries and the newest key, which it
writes to the cache if the newest token is its own; then goes through its tiles. What the shared memory holds by then is
read while the linear layers before, which are short of work rather than of bandwidth, still run. Rows that decode beside
prompts (TURNED, with a cache of 8 bits) come with turned queries and all keys cached, so they wait before they copy.

Each warp has its own 16 keys of a tile and its own softmax over them, so warps exchange nothing until the end: a product
with a batch of ``WARPS``. Of the product's sixteen rows a KV head's queries take at most eight. In S = Q K^T the others are
the queries' second halves, whose product with the keys' second halves comes out there; in O = P V they are nothing.
What follows the wait is a chain of latencies, so all there is done once: a warp turns a head, and what no kernel of the step
writes (block ids, norms, angles) is there before.

A cache of 8-bit floats is copied as 16-bit words of two columns, because what loads the second factor of a product from shared
memory, keys as they lie and values turned, is made for 16 bits. A factor of words becomes two in the same threads, of the even
columns and of the odd ones, by three instructions for four numbers; as f16, which holds all of them.

Splits of one row meet in the first one's shared memory when they fill no more than a cluster, else in the L2 cache.

This is Gluon, Triton's lower-level language: Triton itself copies nothing to shared memory ahead of the loop that reads it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.paged_attention.hopper.triton_copy import copy_keys, copy_layout, load_blocks
from headway.kernels.paged_attention.hopper.triton_factors import (
    in_order,
    pack_of,
    share_queries,
    shared_queries,
    unpaired,
    whole,
    word_pointer,
)
from headway.kernels.paged_attention.hopper.triton_merge import (
    cluster_bytes,
    cubed,
    finish,
    lower,
    merge_layout,
    merge_warps,
    put_own,
    put_parts,
    room_bytes,
    row_count,
    sent_bytes,
    stacked,
    upper,
)
from headway.kernels.triton_cached import as_cached
from headway.kernels.triton_cluster import cluster_buffer, open_mailbox, shared_room

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def head_layout(size, warps):
    """Threads over [heads, D / 2]: a head in one warp."""
    return gl.BlockedLayout([1, size // 64], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def scaled(x, rstd, weight):
    """RMS norm with ``rms_norm``'s rounding: normalise, round, times weight, round."""
    return ((x.to(gl.float32) * rstd).to(x.dtype).to(gl.float32) * weight.to(gl.float32)).to(x.dtype)


@gluon.jit
def load_halves(ptr, at, keep, D: gl.constexpr):
    """Both halves [heads, D / 2] of heads at ``ptr`` + ``at``."""
    return gl.load(ptr + at, mask=keep, other=0.0), gl.load(ptr + at + D // 2, mask=keep, other=0.0)


@gluon.jit
def turned(halves, turn, norm, eps, D: gl.constexpr, NORM: gl.constexpr):
    """Both halves [heads, D / 2] of heads, normed and rotated, rounded as ``rope_kv_write`` does. ``turn``: cos, sin."""
    low, high = halves
    cos, sin = turn
    if NORM:
        low_weight, high_weight = norm
        a = low.to(gl.float32)
        b = high.to(gl.float32)
        rstd = gl.expand_dims(gl.rsqrt(gl.sum(a * a + b * b, axis=1) / D + eps), 1)
        low = scaled(low, rstd, low_weight)
        high = scaled(high, rstd, high_weight)
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
def lowest_seen(newest, size, REACH: gl.constexpr):
    """The first position that the token at ``newest`` sees: of a window (REACH 1) or chunk (2) of ``size``, else 0."""
    lowest = newest * 0
    if REACH == 1:
        lowest = gl.maximum(newest - size + 1, 0)
    if REACH == 2:
        lowest = gl.maximum(newest, 0) // size * size
    return lowest


@gluon.jit
def split_plan(seq_len, window, min_tiles, num_splits, BLOCK_N: gl.constexpr, REACH: gl.constexpr):
    """(first tile, number of tiles, tiles per split, splits in use) of a row, from its true length."""
    first = 0
    if REACH > 0:
        first = lowest_seen(gl.maximum(seq_len - 1, 0), window, REACH) // BLOCK_N
    tiles = (seq_len + BLOCK_N - 1) // BLOCK_N - first
    wanted = gl.maximum(gl.minimum((tiles + min_tiles - 1) // min_tiles, num_splits), 1)
    share = gl.maximum((tiles + wanted - 1) // wanted, 1)
    return first, tiles, share, (tiles + share - 1) // share


@gluon.jit
def decayed(x, decay, S: gl.constexpr):
    """``x`` [WARPS, 16, N], the rows in use times ``decay`` [WARPS, 8, 1]."""
    first = upper(x)
    first *= gl.convert_layout(decay, first.type.layout, assert_trivial=True)
    return gl.convert_layout(stacked(first, lower(x)), S, assert_trivial=True)


@gluon.jit
def fold(
    state, q, k_smem, v_smem, at, limit, lowest, scale, soft_cap,
    FIRST: gl.constexpr, REACH: gl.constexpr, CAPPED: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """One tile of keys and values [WARPS, KEYS, D], the first of which is key ``at``, into each warp's softmax.

    ``q`` [WARPS, 16, D / 2]: both halves of eight queries, one below the other. With words of two numbers tiles are
    [WARPS, KEYS, D / 2], q has the even columns above the odd ones, and the outputs have them one behind the other.
    """
    WORDS: gl.constexpr = k_smem.dtype == gl.int16
    B: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    WARPS: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    HALF: gl.constexpr = q.shape[2]
    o, total, top = state
    keys = k_smem.permute((0, 2, 1))
    zero = gl.zeros([WARPS, 16, KEYS], gl.float32, layout=S)
    if WORDS:
        first, second = unpaired(keys.load(B))
    else:
        first, second = keys.slice(0, HALF, 1).load(B), keys.slice(HALF, HALF, 1).load(B)
    s = upper(mma_v2(q, first, zero))
    s += lower(mma_v2(q, second, zero))
    LAYOUT: gl.constexpr = s.type.layout
    key = at + KEYS * cubed(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1, 2)
    key += cubed(gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0, 1)
    seen = key < limit
    if REACH > 0:
        seen = seen & (key >= lowest)
    if CAPPED:
        s = base_2(s, scale, soft_cap, CAPPED)
        factor = 1.0
    else:  # folded into the exponent
        factor = scale * LOG2E
    s = gl.where(seen, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=2) * factor)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a warp that has seen nothing yet
    weights = gl.exp2(s * factor - gl.expand_dims(shift, 2))
    # Nobody reads the other eight rows. Copies of the first would be made anew before each product.
    p = stacked(weights.to(q.dtype), (weights + weights).to(q.dtype))
    p = gl.convert_layout(p, gl.DotOperandLayout(0, S, 2), assert_trivial=True)
    ones = gl.full([WARPS, KEYS, 8], 1.0, q.dtype, layout=B)
    if not FIRST:
        decay = gl.expand_dims(gl.exp2(top - shift), 2)
        total = decayed(total, decay, S)
        o = decayed(o, decay, S)
    v = v_smem.load(B)
    if WORDS:
        v = whole(v, B)
    return mma_v2(p, v, o), mma_v2(p, ones, total), new_top


@gluon.jit
def cache_place(kv_slot, mine, num_blocks, block_stride, OFFSET_STRIDE: gl.constexpr, BS: gl.constexpr):
    """(whether to write the newest key and value, where in a head's cache)."""
    write = mine & (kv_slot >= 0) & (kv_slot < num_blocks * BS)
    slot = gl.where(write, kv_slot, 0)
    return write, (slot // BS).to(gl.int64) * block_stride + (slot % BS) * OFFSET_STRIDE


@gluon.jit
def start_copies(
    smem, heads, cache, begin,
    OFFSET_STRIDE: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, STAGES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start copying the first ``STAGES`` tiles from tile ``begin`` on; the block ids of the one after them."""
    k_smem, v_smem = smem
    k_head, v_head = heads
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    blocks = (load_blocks(cache, begin, BS, BLOCK_N, COPY),)  # of all tiles in one trip
    for i in gl.static_range(STAGES):
        block = load_blocks(cache, begin + i + 1, BS, BLOCK_N, COPY)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005  Triton knows no unpacking
    for i in gl.static_range(STAGES):
        block = blocks[i]
        copy_keys(k_smem.index(i), k_head, block, cache, begin + i, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
        copy_keys(v_smem.index(i), v_head, block, cache, begin + i, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
        async_copy.commit_group()
    return blocks[STAGES]


@gluon.jit
def load_turns(angles, q_norm_ptr, k_norm_ptr, D: gl.constexpr, WARPS: gl.constexpr,
               Q_NORM: gl.constexpr, K_NORM: gl.constexpr):  # fmt: skip
    """Angles and weights of both norms, all as halves [1, D / 2]; the angles again for a norm that there is not."""
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, head_layout(D, WARPS))), 0)
    turn = load_halves(angles, half, half < D, D)
    q_norm, k_norm = turn, turn
    if Q_NORM:
        q_norm = load_halves(q_norm_ptr, half, half < D, D)
    if K_NORM:
        k_norm = load_halves(k_norm_ptr, half, half < D, D)
    return turn, q_norm, k_norm


@gluon.jit
def take_row(
    row_ptr, turns, eps, heads, kv_head, mine, place, q_smem, room, scale, soft_cap,
    H: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
    Q_NORM: gl.constexpr, K_NORM: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """From a row of projections: its queries into shared memory. Where ``mine``, its key and value to the cache at ``place``
    and the key's logits into the room. The value [1, D] as f32, 0 unless ``mine``."""
    cached: gl.constexpr = heads[0].dtype.element_ty
    HEADS: gl.constexpr = head_layout(D, WARPS)
    VALUES: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS, D, WARPS))
    turn, q_norm, k_norm = turns
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEADS)), 0)
    head = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, HEADS)), 1)
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, VALUES)), 0)
    q = load_halves(row_ptr, (kv_head * GROUP + head) * D + half, head < GROUP, D)
    new_k = load_halves(row_ptr, (H + kv_head) * D + half, half < D, D)
    new_v = gl.load(row_ptr + (H + H // GROUP + kv_head) * D + dim, mask=(dim < D) & mine, other=0.0)
    q_low, q_high = turned(q, turn, q_norm, eps, D, Q_NORM)
    k_low, k_high = turned(new_k, turn, k_norm, eps, D, K_NORM)
    share_queries(q_smem, q_low, q_high, D, WARPS, cached == gl.float8e4nv)
    k_low, k_high, new_v = as_cached(k_low, cached), as_cached(k_high, cached), as_cached(new_v, cached)
    if mine:
        k_head, v_head = heads
        write, at = place
        gl.store(k_head + at + half, k_low, mask=write & (half < D))
        gl.store(k_head + at + D // 2 + half, k_high, mask=write & (half < D))
        gl.store(v_head + at + dim, new_v, mask=write & (dim < D))
        products = q_low.to(gl.float32) * k_low.to(gl.float32) + q_high.to(gl.float32) * k_high.to(gl.float32)
        put_own(room, base_2(gl.sum(products, axis=1), scale, soft_cap, CAPPED), WARPS, D)
    return new_v.to(gl.float32)


@gluon.jit
def take_queries(row_ptr, kv_head, q_smem, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
                 WORDS: gl.constexpr):  # fmt: skip
    """From a row of queries that are turned: its own into shared memory. The value [1, D] of no token, as ``take_row``."""
    HEADS: gl.constexpr = head_layout(D, WARPS)
    VALUES: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS, D, WARPS))
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEADS)), 0)
    head = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, HEADS)), 1)
    low, high = load_halves(row_ptr, (kv_head * GROUP + head) * D + half, head < GROUP, D)
    share_queries(q_smem, low, high, D, WARPS, WORDS)
    return gl.expand_dims(gl.zeros([D], gl.float32, layout=gl.SliceLayout(0, VALUES)), 0)


@gluon.jit
def fold_tiles(
    smem, heads, ahead, cache, queries, begin, count, newest, window, scale, soft_cap,
    OFFSET_STRIDE: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, STAGES: gl.constexpr,
    REACH: gl.constexpr, CAPPED: gl.constexpr, S: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Each warp's softmax over its keys of ``count`` tiles, of which the first ``STAGES`` are on their way: outputs
    [WARPS, 16, D], totals [WARPS, 16, 8 alike], tops [WARPS, 8]. All warps see the first tile."""
    k_smem, v_smem = smem
    k_head, v_head = heads
    _, limit, _, _ = cache
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = BLOCK_N // WARPS
    WIDTH: gl.constexpr = k_smem.shape[2]
    lowest = lowest_seen(newest, window, REACH)
    o = gl.zeros([WARPS, 16, D], gl.float32, layout=S)
    total = gl.zeros([WARPS, 16, 8], gl.float32, layout=S)
    top = gl.max(upper(gl.full([WARPS, 16, KEYS], float("-inf"), gl.float32, layout=S)), axis=2)
    if count > 0:
        k_tile = k_smem.index(0).reshape([WARPS, KEYS, WIDTH])
        v_tile = v_smem.index(0).reshape([WARPS, KEYS, WIDTH])
        state = (o, total, top)
        at = begin * BLOCK_N
        o, total, top = fold(state, queries, k_tile, v_tile, at, limit, lowest, scale, soft_cap, True, REACH, CAPPED, S)
    for i in range(1, count):
        gl.thread_barrier()  # all warps have read the tile before
        if i - 1 + STAGES < count:
            tile = begin + i - 1 + STAGES
            copy_keys(
                k_smem.index((i - 1) % STAGES), k_head, ahead, cache, tile, OFFSET_STRIDE, WIDTH, BS, BLOCK_N, COPY
            )
            copy_keys(
                v_smem.index((i - 1) % STAGES), v_head, ahead, cache, tile, OFFSET_STRIDE, WIDTH, BS, BLOCK_N, COPY
            )
            ahead = load_blocks(cache, tile + 1, BS, BLOCK_N, COPY)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()  # all warps see this one
        k_tile = k_smem.index(i % STAGES).reshape([WARPS, KEYS, WIDTH])
        v_tile = v_smem.index(i % STAGES).reshape([WARPS, KEYS, WIDTH])
        state = (o, total, top)
        at = (begin + i) * BLOCK_N
        o, total, top = fold(
            state, queries, k_tile, v_tile, at, limit, lowest, scale, soft_cap, False, REACH, CAPPED, S
        )
    if k_smem.dtype == gl.int16:
        o = in_order(o)
    return o, total, top


@gluon.jit(
    do_not_specialize=["num_splits", "min_tiles", "window", "num_blocks", "num_slots", "num_positions"],
    do_not_specialize_on_alignment=[
        "row_slots_ptr", "seq_lens_ptr", "tables_ptr", "arrivals_ptr", "positions_ptr", "kv_slots_ptr",
    ],
)  # fmt: skip
def early_decode_kernel(
    qkv_ptr,  # [R, (H + 2 * KH) * D], or [R, H * D] with TURNED
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    out_ptr,  # [R, H, D]
    partial_ptr,  # f32 [R, H, num_splits, D]
    stats_ptr,  # f32 [R, H, num_splits, 2], base-2 scale of the split's sums, sum of its weights
    arrivals_ptr,  # int32 [R, KH], zero before and after: splits of the row that are done
    tables_ptr,  # [S, table_width]
    row_slots_ptr, seq_lens_ptr, positions_ptr,  # [R]
    cos_sin_ptr,  # [num_positions, D]
    q_norm_ptr, k_norm_ptr, kv_slots_ptr,  # [D], [D], [R]
    num_slots, num_blocks, num_positions, table_width, num_splits, min_tiles,
    scale, window, soft_cap, eps, sinks_ptr,  # window or chunk, see REACH; f32 [H], with SINKS
    qkv_stride, block_stride, head_stride,
    OFFSET_STRIDE: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BS: gl.constexpr,
    STAGES: gl.constexpr, KEYS: gl.constexpr,  # tiles in shared memory, and each warp's keys of one
    CLUSTER: gl.constexpr,  # programs of a cluster, 1 for none
    TURNED: gl.constexpr,  # queries are normed and rotated, and the newest key and value in the cache
    REACH: gl.constexpr,  # 0: all keys, 1: a window, 2: a chunk
    CAPPED: gl.constexpr, SINKS: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid: KV heads, rows, splits; splits, KV heads, rows with clusters. A row that needs one split writes its output."""
    if EARLY:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_N: gl.constexpr = WARPS * KEYS
    ROWS: gl.constexpr = row_count(GROUP)
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    PACK: gl.constexpr = pack_of(k_ptr.dtype.element_ty)  # numbers of a word, as which the cache is copied
    WIDTH: gl.constexpr = D // PACK
    word: gl.constexpr = gl.int16 if PACK == 2 else k_ptr.dtype.element_ty
    COPY: gl.constexpr = copy_layout(WARPS, WIDTH, BLOCK_N)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * WIDTH), 16, 2)
    room = shared_room(room_bytes(WARPS, ROWS, D))
    mailbox = room
    kv_head, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if CLUSTER > 1:  # neighbours along the first dimension of the grid
        split, kv_head, row = kv_head, row, split
        mailbox = cluster_buffer(cluster_bytes(CLUSTER, ROWS, D), CLUSTER)
    slot = gl.load(row_slots_ptr + row)
    if not TURNED:
        kv_slot = gl.load(kv_slots_ptr + row)
        position = gl.minimum(gl.maximum(gl.load(positions_ptr + row), 0), num_positions - 1)
    known = (slot >= 0) & (slot < num_slots)
    seq_len = gl.where(known, gl.minimum(gl.load(seq_lens_ptr + row), table_width * BS), 0)
    first, tiles, share, used = split_plan(seq_len, window, min_tiles, num_splits, BLOCK_N, REACH)
    active = split < gl.maximum(used, 1)
    if CLUSTER > 1:
        open_mailbox(mailbox, gl.where(active, used * sent_bytes(ROWS, D, WARPS), 0))
    if not active:
        if EARLY:
            gdc_wait()
        return
    newest = seq_len - 1
    begin = first + split * share  # tiles, as follows
    limit = gl.minimum((begin + gl.minimum(share, tiles - split * share)) * BLOCK_N, seq_len if TURNED else newest)
    count = gl.maximum(limit - begin * BLOCK_N + BLOCK_N - 1, 0) // BLOCK_N
    cache = (tables_ptr + gl.where(known, slot, 0).to(gl.int64) * table_width, limit, num_blocks, block_stride // PACK)
    heads = (k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride)
    words = (word_pointer(heads[0], word), word_pointer(heads[1], word))
    smem = (
        gl.allocate_shared_memory(word, [STAGES, BLOCK_N, WIDTH], SHARED),
        gl.allocate_shared_memory(word, [STAGES, BLOCK_N, WIDTH], SHARED),
    )
    FACTORS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.float16 if PACK == 2 else word, [16, D // 2], FACTORS)
    row_ptr = qkv_ptr + row.to(gl.int64) * qkv_stride
    mine = (split == used - 1) & (not TURNED)  # the newest token is the last of the last split
    if TURNED and EARLY:
        gdc_wait()
    ahead = start_copies(smem, words, cache, begin, OFFSET_STRIDE // PACK, WIDTH, BS, STAGES, COPY)
    if TURNED:
        new_v = take_queries(row_ptr, kv_head, q_smem, GROUP, ROWS, D, WARPS, PACK == 2)
    else:
        angles = cos_sin_ptr + position.to(gl.int64) * D
        turns = load_turns(angles, q_norm_ptr, k_norm_ptr, D, WARPS, Q_NORM, K_NORM)
        place = cache_place(kv_slot, mine, num_blocks, block_stride, OFFSET_STRIDE, BS)
        if EARLY:
            gdc_wait()
        new_v = take_row(
            row_ptr, turns, eps, heads, kv_head, mine, place, q_smem, room, scale, soft_cap,
            H, GROUP, ROWS, D, WARPS, Q_NORM, K_NORM, CAPPED,
        )  # fmt: skip
    async_copy.wait_group(STAGES - 1)
    gl.thread_barrier()  # all warps see the queries and the first tile
    queries = shared_queries(q_smem, WARPS, S)
    o, total, top = fold_tiles(
        smem, words, ahead, cache, queries, begin, count, newest, window, scale, soft_cap,
        OFFSET_STRIDE // PACK, D, BS, STAGES, REACH, CAPPED, S, COPY,
    )  # fmt: skip
    put_parts(room, o, top, total, ROWS)
    async_copy.wait_group(0)
    gl.thread_barrier()  # all warps' parts are in the room
    merged = merge_warps(room, new_v, mine, WARPS, ROWS, D)
    arrival = arrivals_ptr + row * (H // GROUP) + kv_head
    finish(
        merged, out_ptr, partial_ptr, stats_ptr, arrival, mailbox, row.to(gl.int64) * H + kv_head * GROUP, split, used,
        num_splits, sinks_ptr + kv_head * GROUP, GROUP, WARPS, CLUSTER, SINKS,
    )  # fmt: skip
