"""Decode attention for Hopper: the first keys and values are in shared memory before the projections are there.

A program takes one row, KV head and split of the row's keys. It starts copying its first ``STAGES`` tiles, which earlier steps
wrote, then waits for the kernel before it (see ``triton_early``); norms and rotates its queries and the newest key, which it
writes to the cache if the newest token is its own; then goes through its tiles. What the shared memory holds by then is
read while the linear layers before, which are short of work rather than of bandwidth, still run. Where another layer has
written the newest key (STORED), it comes from the cache, behind the wait as well. Rows that decode beside prompts (TURNED,
with a cache of 8 bits) come with turned queries and all keys cached, so they wait before they copy.

A row of drafts has up to WIDTH tokens, whose keys are none of the cache's yet: see ``triton_take``. The queries of whole tokens
that a product has rows for go to one program, those of the others to programs beside it, which read the same keys.

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
    merge_warps,
    put_parts,
    room_bytes,
    row_count,
    sent_bytes,
    stacked,
    upper,
)
from headway.kernels.paged_attention.hopper.triton_take import (
    LOG2E,
    base_2,
    clear_idle,
    lowest_seen,
    row_tokens,
    take_tokens,
    tokens_of,
)
from headway.kernels.triton_cluster import cluster_buffer, open_mailbox, shared_room


@gluon.jit
def split_plan(seq_len, oldest, window, min_tiles, num_splits, BLOCK_N: gl.constexpr, REACH: gl.constexpr):
    """(first tile, number of tiles, tiles per split, splits in use) of a row, from its true length and the position of its
    first query."""
    first = 0
    if REACH > 0:
        first = lowest_seen(gl.maximum(oldest, 0), window, REACH) // BLOCK_N
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
    state, q, k_smem, v_smem, at, limit, position, window, scale, soft_cap,
    FIRST: gl.constexpr, REACH: gl.constexpr, CAPPED: gl.constexpr, S: gl.constexpr,
    SHARE: gl.constexpr,  # queries of one token; 0: all are of one
    CAUSAL: gl.constexpr,  # there may be keys of tokens behind a query's
):  # fmt: skip
    """One tile of keys and values [WARPS, KEYS, D], the first of which is key ``at``, into each warp's softmax. The first
    query is that of the token at ``position``.

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
    if SHARE > 0:
        query = cubed(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0, 2)
        position += query // SHARE
    if CAUSAL:
        seen = seen & (key <= position)
    if REACH > 0:
        seen = seen & (key >= lowest_seen(position, window, REACH))
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
def fold_tiles(
    smem, heads, ahead, cache, queries, begin, count, position, window, scale, soft_cap,
    OFFSET_STRIDE: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, STAGES: gl.constexpr,
    REACH: gl.constexpr, CAPPED: gl.constexpr, S: gl.constexpr, COPY: gl.constexpr,
    SHARE: gl.constexpr, CAUSAL: gl.constexpr,
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
    o = gl.zeros([WARPS, 16, D], gl.float32, layout=S)
    total = gl.zeros([WARPS, 16, 8], gl.float32, layout=S)
    top = gl.max(upper(gl.full([WARPS, 16, KEYS], float("-inf"), gl.float32, layout=S)), axis=2)
    if count > 0:
        k_tile = k_smem.index(0).reshape([WARPS, KEYS, WIDTH])
        v_tile = v_smem.index(0).reshape([WARPS, KEYS, WIDTH])
        state = (o, total, top)
        at = begin * BLOCK_N
        o, total, top = fold(
            state, queries, k_tile, v_tile, at, limit, position, window, scale, soft_cap, True, REACH, CAPPED, S, SHARE, CAUSAL
        )  # fmt: skip
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
            state, queries, k_tile, v_tile, at, limit, position, window, scale, soft_cap, False, REACH, CAPPED, S, SHARE, CAUSAL
        )  # fmt: skip
    if k_smem.dtype == gl.int16:
        o = in_order(o)
    return o, total, top


@gluon.jit(
    do_not_specialize=[
        "num_splits", "min_tiles", "window", "num_blocks", "num_slots", "num_positions", "num_rows", "num_tokens",
    ],
    do_not_specialize_on_alignment=[
        "row_slots_ptr", "seq_lens_ptr", "query_start_ptr", "tables_ptr", "arrivals_ptr", "positions_ptr", "kv_slots_ptr",
    ],
)  # fmt: skip
def early_decode_kernel(
    qkv_ptr,  # [T, (H + 2 * KH) * D], or [T, H * D] with TURNED or STORED
    k_ptr, v_ptr,  # [NB, BS, KH, D]
    out_ptr,  # [T, H, D]
    partial_ptr, stats_ptr,  # f32 [T, H, num_splits, D]; [T, H, num_splits, 2], base-2 scale and weights of a split's sums
    arrivals_ptr, tables_ptr,  # int32 [R, KH, PARTS], zero before and after: splits that are done; [S, table_width]
    row_slots_ptr, seq_lens_ptr, query_start_ptr,  # [R], [R], [R + 1], the last one with WIDTH > 1
    positions_ptr, cos_sin_ptr,  # [T], [num_positions, D]
    q_norm_ptr, k_norm_ptr, kv_slots_ptr,  # [D], [D], [T]
    num_rows, num_tokens, num_slots, num_blocks, num_positions, table_width, num_splits, min_tiles,
    scale, window, soft_cap, eps, sinks_ptr, qkv_stride, block_stride, head_stride,  # window or chunk, see REACH; f32 [H]
    OFFSET_STRIDE: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BS: gl.constexpr,
    STAGES: gl.constexpr, KEYS: gl.constexpr,  # tiles in shared memory, and each warp's keys of one
    CLUSTER: gl.constexpr, WIDTH: gl.constexpr,  # programs of a cluster, 1 for none; tokens of a row at most
    TURNED: gl.constexpr,  # queries are normed and rotated, and all keys and values in the cache
    STORED: gl.constexpr,  # the newest keys and values are in the cache, but an earlier kernel of the step may still write them
    REACH: gl.constexpr,  # 0: all keys, 1: a window, 2: a chunk
    CAPPED: gl.constexpr, SINKS: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid: KV heads x ``PARTS``, rows, splits; splits, KV heads x ``PARTS``, rows with clusters."""
    if EARLY:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_N: gl.constexpr = WARPS * KEYS
    TOKENS: gl.constexpr = tokens_of(WIDTH, GROUP)
    PARTS: gl.constexpr = (WIDTH + TOKENS - 1) // TOKENS
    STEP: gl.constexpr = 0 if WIDTH == 1 else H - GROUP
    ROWS: gl.constexpr = row_count(TOKENS * GROUP)
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    PACK: gl.constexpr = pack_of(k_ptr.dtype.element_ty)  # numbers of a word, as which the cache is copied
    COLUMNS: gl.constexpr = D // PACK
    word: gl.constexpr = gl.int16 if PACK == 2 else k_ptr.dtype.element_ty
    COPY: gl.constexpr = copy_layout(WARPS, COLUMNS, BLOCK_N)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * COLUMNS), 16, 2)
    room = shared_room(room_bytes(WARPS, ROWS, D, WIDTH))
    mailbox = room
    kv_head, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if CLUSTER > 1:  # neighbours along the first dimension of the grid
        split, kv_head, row = kv_head, row, split
        mailbox = cluster_buffer(cluster_bytes(CLUSTER, ROWS, D), CLUSTER)
    arrival = arrivals_ptr + row * (H // GROUP * PARTS) + kv_head
    # Queries of the row's tokens from ``offset`` on are here.
    offset, kv_head = kv_head % PARTS * TOKENS, kv_head // PARTS
    slot = gl.load(row_slots_ptr + row)
    first_token, tokens = row_tokens(query_start_ptr, row, WIDTH)
    known = (slot >= 0) & (slot < num_slots)
    seq_len = gl.where(known, gl.minimum(gl.load(seq_lens_ptr + row), table_width * BS), 0)
    seq_len = gl.where(seq_len < tokens, 0, seq_len)
    oldest = seq_len - tokens  # the position of the row's first token
    first, tiles, share, used = split_plan(seq_len, oldest, window, min_tiles, num_splits, BLOCK_N, REACH)
    active = split < gl.maximum(used, 1)
    if CLUSTER > 1:
        open_mailbox(mailbox, gl.where(active, used * sent_bytes(ROWS, D, WARPS), 0))
    if not active:
        if EARLY:
            gdc_wait()
        return
    begin = first + split * share  # tiles, as follows
    limit = gl.minimum((begin + gl.minimum(share, tiles - split * share)) * BLOCK_N, seq_len if TURNED else oldest)
    count = gl.maximum(limit - begin * BLOCK_N + BLOCK_N - 1, 0) // BLOCK_N
    cache = (tables_ptr + gl.where(known, slot, 0).to(gl.int64) * table_width, limit, num_blocks, block_stride // PACK)
    heads = (k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride)
    words = (word_pointer(heads[0], word), word_pointer(heads[1], word))
    tiles_of_keys = gl.allocate_shared_memory(word, [STAGES, BLOCK_N, COLUMNS], SHARED)
    smem = (tiles_of_keys, gl.allocate_shared_memory(word, [STAGES, BLOCK_N, COLUMNS], SHARED))
    FACTORS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.float16 if PACK == 2 else word, [16, D // 2], FACTORS)
    row_ptr = qkv_ptr + first_token.to(gl.int64) * qkv_stride
    mine = (split == used - 1) & (not TURNED)  # the newest tokens are the last of the last split
    if TURNED and EARLY:
        gdc_wait()
    ahead = start_copies(smem, words, cache, begin, OFFSET_STRIDE // PACK, COLUMNS, BS, STAGES, COPY)
    turn = (positions_ptr, cos_sin_ptr, num_positions, q_norm_ptr, k_norm_ptr, kv_slots_ptr, eps)
    new_v = take_tokens(
        row_ptr, qkv_stride, turn, heads, kv_head, mine, first_token, offset, tokens, oldest, num_blocks, block_stride,
        q_smem, room, scale, soft_cap, window, OFFSET_STRIDE, BS, H, GROUP, ROWS, D, WARPS, WIDTH, TURNED, STORED, Q_NORM,
        K_NORM, CAPPED, REACH, EARLY,
    )  # fmt: skip
    if WIDTH > 1:
        behind = gl.load(query_start_ptr + num_rows) + row * WIDTH
        if split == 0:
            clear_idle(out_ptr, behind, num_tokens, kv_head, offset, H, GROUP, ROWS, D, WARPS, WIDTH)
    async_copy.wait_group(STAGES - 1)
    gl.thread_barrier()  # all warps see the queries and the first tile
    factor = shared_queries(q_smem, WARPS, S)
    o, total, top = fold_tiles(
        smem, words, ahead, cache, factor, begin, count, oldest + offset, window, scale, soft_cap,
        OFFSET_STRIDE // PACK, D, BS, STAGES, REACH, CAPPED, S, COPY, 0 if TOKENS == 1 else GROUP, TURNED and WIDTH > 1,
    )  # fmt: skip
    put_parts(room, o, top, total, ROWS)
    async_copy.wait_group(0)
    gl.thread_barrier()  # all warps' parts are in the room
    merged = merge_warps(room, new_v, mine, WARPS, ROWS, D, WIDTH)
    queries = GROUP if WIDTH == 1 else gl.minimum(gl.maximum(tokens - offset, 0), TOKENS) * GROUP
    first_head = (first_token + offset).to(gl.int64) * H + kv_head * GROUP
    finish(
        merged, out_ptr, partial_ptr, stats_ptr, arrival, mailbox, first_head, queries, split, used, num_splits,
        sinks_ptr + kv_head * GROUP, GROUP, STEP, WARPS, CLUSTER, SINKS,
    )  # fmt: skip
