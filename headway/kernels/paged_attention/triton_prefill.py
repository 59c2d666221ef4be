"""Prefill attention for Hopper: the tensor cores work while the exponentials of the next keys are computed.

A program holds ``BLOCK_M`` (queries x heads of one KV head) in two warpgroups and goes through the keys from the last tile
to the first. In each turn it starts S = Q K^T of a tile and O += P V of the tile before, waits for S alone, and does the
softmax of S while O is still being summed (the overlap within a warpgroup of Shah et al., FlashAttention-3, 2024). Keys
and values are copied asynchronously one turn ahead, block ids two turns ahead.

A program takes a late and an early tile of queries of one row, so that all programs of a row have the same work, and copies
the second tile's queries and first keys before it has finished the first tile.

This is Gluon, Triton's lower-level language: Triton itself waits for a product before anything else touches registers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
SPAN = gl.constexpr(8)
"""Keys that lie together in every cache, whose smallest block this is: one block id serves them."""


@gluon.constexpr_function
def rows_layout(warps, size):
    """Threads over [BLOCK_M, D], 16 bytes of a head each."""
    return gl.BlockedLayout([1, 8], [256 // size, size // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def copy_layout(warps, size, keys):
    """Threads over [keys / SPAN, SPAN, D]: a thread copies keys of one span, so that it needs one block id."""
    lanes = size // 8  # along a head
    rows = keys * lanes // (32 * warps)
    return gl.BlockedLayout([1, rows, 8], [32 // lanes * rows // 8, 8 // rows, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def load_blocks(cache, tile, BS: gl.constexpr, BLOCK_N: gl.constexpr, COPY: gl.constexpr):
    """[BLOCK_N / SPAN] block ids of a tile's spans, block 0 where there is none."""
    table, seq_len, num_blocks, _ = cache
    span = gl.arange(0, BLOCK_N // SPAN, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    position = gl.maximum(tile, 0) * BLOCK_N + SPAN * span
    block = gl.load(table + position // BS, mask=position < seq_len, other=0)
    return gl.where((block >= 0) & (block < num_blocks), block, 0)


@gluon.jit
def copy_keys(
    target,  # shared [BLOCK_N, D]
    source,  # k_ptr or v_ptr at the KV head
    block,
    cache,
    tile,
    MASKED: gl.constexpr,
    OFFSET_STRIDE: gl.constexpr,
    D: gl.constexpr,
    BS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COPY: gl.constexpr,
):
    """Start copying a tile of keys or values. MASKED: places past the row's end, which may hold anything, become zeros."""
    _, seq_len, _, block_stride = cache
    span = SPAN * gl.arange(0, BLOCK_N // SPAN, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    step = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, COPY)))
    inside = span % BS
    if BS > BLOCK_N:
        inside = (tile * BLOCK_N + span) % BS
    place = source + block.to(gl.int64) * block_stride + inside * OFFSET_STRIDE
    place = gl.expand_dims(gl.expand_dims(place, 1), 2)
    place += gl.expand_dims(gl.expand_dims(step * OFFSET_STRIDE, 0), 2) + gl.expand_dims(gl.expand_dims(dim, 0), 0)
    target = target.reshape([BLOCK_N // SPAN, SPAN, D])
    if MASKED:
        position = tile * BLOCK_N + gl.expand_dims(span, 1) + gl.expand_dims(step, 0)
        async_copy.async_copy_global_to_shared(target, place, mask=gl.expand_dims(position < seq_len, 2))
    else:
        async_copy.async_copy_global_to_shared(target, place)


@gluon.jit
def fold(s, top, total, position, q_position, factor, masked):
    """Online softmax of a tile's logits: (weights, sum of weights, running maximum, decay of what came before)."""
    if masked:
        s = gl.where(gl.expand_dims(position, 0) <= gl.expand_dims(q_position, 1), s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=1) * factor)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a query that has seen nothing yet
    weights = gl.exp2(s * factor - gl.expand_dims(shift, 1))
    decay = gl.exp2(top - shift)
    return weights, total * decay + gl.sum(weights, axis=1), new_top, decay


@gluon.jit
def find_span(row, num_rows, num_tokens, num_slots, capacity, query_start_ptr, row_slots_ptr, seq_lens_ptr):
    """(first token, queries, slot, length) of a row; length 0 for row ``num_rows``, the padding behind the last row."""
    token = gl.load(query_start_ptr + row)
    token_end = gl.load(query_start_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    slot = gl.load(row_slots_ptr + row, mask=row < num_rows, other=-1)
    seq_len = gl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    known = (slot >= 0) & (slot < num_slots)
    token = gl.maximum(token, 0)
    return (
        token,
        gl.minimum(token_end, num_tokens) - token,
        gl.where(known, slot, 0),
        gl.where(known, gl.minimum(seq_len, capacity), 0),
    )


@gluon.jit
def tile_bounds(tile, num_queries, seq_len, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr):
    """(position of its first query, tile that holds its last query's own key) of a tile of queries."""
    offset = seq_len - num_queries
    return offset + tile * BLOCK_Q, (offset + gl.minimum((tile + 1) * BLOCK_Q, num_queries) - 1) // BLOCK_N


@gluon.jit
def attend_tile(
    q_smem, k_smem, v_smem, k_head, v_head, cache, block, ahead, position, last, factor, GROUP: gl.constexpr,
    OFFSET_STRIDE: gl.constexpr, BS: gl.constexpr, COPY: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """All keys of a tile of queries but the values of the first tile: (O so far, the first tile's P, sum of weights).

    Its queries and last keys are being copied already, ``block`` and ``ahead`` are the ids of its last and last but one
    tile. What shared memory holds is read when this returns, but for the first values.
    """
    BLOCK_M: gl.constexpr = q_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = q_smem.shape[1]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    if last > 0:
        copy_keys(
            k_smem.index((last + 1) % 2), k_head, ahead, cache, last - 1, False, OFFSET_STRIDE, D, BS, BLOCK_N, COPY
        )
    copy_keys(v_smem.index(last % 2), v_head, block, cache, last, True, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
    async_copy.commit_group()
    block = ahead
    ahead = load_blocks(cache, last - 2, BS, BLOCK_N, COPY)
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
    q_position = position + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, S_LAYOUT)) // GROUP
    num_full = (position + 1) // BLOCK_N  # tiles below the diagonal, seen whole by every query
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S_LAYOUT)
    o = gl.zeros([BLOCK_M, D], gl.float32, layout=O_LAYOUT)
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    s = warpgroup_mma(q_smem, k_smem.index(last % 2).permute((1, 0)), nothing, use_acc=False)
    weights, total, top, decay = fold(s, top, total, last * BLOCK_N + key, q_position, factor, True)
    p = gl.convert_layout(weights.to(q_smem.dtype), P_LAYOUT)
    for turn in range(last):
        j = last - 1 - turn
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # all warps see the copies, and have read what the next ones overwrite
        s_later = warpgroup_mma(q_smem, k_smem.index(j % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
        o_later = warpgroup_mma(p, v_smem.index((j + 1) % 2), o, is_async=True)
        if j > 0:
            copy_keys(
                k_smem.index((j + 1) % 2), k_head, ahead, cache, j - 1, False, OFFSET_STRIDE, D, BS, BLOCK_N, COPY
            )
        copy_keys(v_smem.index(j % 2), v_head, block, cache, j, False, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
        async_copy.commit_group()
        block = ahead
        ahead = load_blocks(cache, j - 2, BS, BLOCK_N, COPY)
        s = warpgroup_mma_wait(1, deps=[s_later])
        weights, total, top, decay = fold(s, top, total, j * BLOCK_N + key, q_position, factor, j >= num_full)
        p = gl.convert_layout(weights.to(q_smem.dtype), P_LAYOUT)
        o = warpgroup_mma_wait(0, deps=[o_later])
        o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT)), 1)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    return o, p, total


@gluon.jit(
    do_not_specialize=["num_tokens", "num_rows", "first_row", "num_blocks", "num_slots", "most_tiles"],
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr", "tables_ptr"],
)
def overlapped_prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    out_ptr,  # [T, H, D]
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    num_tokens,
    num_rows,
    first_row,  # rows before it are decode rows, one token each
    num_slots,
    num_blocks,
    table_width,
    most_tiles,  # 1 or 2: tiles of queries that a program takes
    scale,
    q_stride,
    block_stride,
    head_stride,
    OFFSET_STRIDE: gl.constexpr,
    H: gl.constexpr,
    KH: gl.constexpr,
    D: gl.constexpr,
    BS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Grid: KH, rows from ``first_row`` on and one for padding, most tiles of a row over ``most_tiles``."""
    GROUP: gl.constexpr = H // KH
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP
    WARPS: gl.constexpr = BLOCK_M // 16
    LOAD: gl.constexpr = rows_layout(WARPS, D)
    COPY: gl.constexpr = copy_layout(WARPS, D, BLOCK_N)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    kv_head = gl.program_id(0)
    number = gl.program_id(2)
    token, num_queries, slot, seq_len = find_span(
        first_row + gl.program_id(1), num_rows, num_tokens, num_slots, table_width * BS,
        query_start_ptr, row_slots_ptr, seq_lens_ptr,
    )  # fmt: skip
    tiles = (num_queries + BLOCK_Q - 1) // BLOCK_Q
    member = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOAD))
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, LOAD)), 0)
    head = (kv_head * GROUP + member % GROUP) * D
    if seq_len < num_queries:  # a zombie or padding, which may have more tiles than any row
        for tile in range(number, tiles, gl.num_programs(2)):
            query = tile * BLOCK_Q + member // GROUP
            place = gl.expand_dims((token + query).to(gl.int64) * (H * D) + head, 1) + dim
            keep = gl.expand_dims(query < num_queries, 1)
            gl.store(out_ptr + place, gl.zeros([BLOCK_M, D], dtype, layout=LOAD), mask=keep)
        return
    if number * most_tiles >= tiles:
        return
    tile = tiles - 1 - number
    turns = gl.where((most_tiles > 1) & (tile != number), 2, 1)  # the second tile is this one's mirror image

    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, D], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], SHARED)
    cache = (tables_ptr + slot.to(gl.int64) * table_width, seq_len, num_blocks, block_stride)
    k_head, v_head = k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride
    position, last = tile_bounds(tile, num_queries, seq_len, BLOCK_Q, BLOCK_N)
    block = load_blocks(cache, last, BS, BLOCK_N, COPY)
    ahead = load_blocks(cache, last - 1, BS, BLOCK_N, COPY)
    query = tile * BLOCK_Q + member // GROUP
    place = gl.expand_dims((token + query).to(gl.int64) * q_stride + head, 1) + dim
    async_copy.async_copy_global_to_shared(q_smem, q_ptr + place, mask=gl.expand_dims(query < num_queries, 1))
    copy_keys(k_smem.index(last % 2), k_head, block, cache, last, True, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
    async_copy.commit_group()
    for turn in range(turns):
        o, p, total = attend_tile(
            q_smem, k_smem, v_smem, k_head, v_head, cache, block, ahead, position, last, scale * LOG2E,
            GROUP, OFFSET_STRIDE, BS, COPY, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        o_later = warpgroup_mma(p, v_smem.index(0), o, is_async=True)
        if turn + 1 < turns:
            position, last = tile_bounds(number, num_queries, seq_len, BLOCK_Q, BLOCK_N)
            block = load_blocks(cache, last, BS, BLOCK_N, COPY)
            ahead = load_blocks(cache, last - 1, BS, BLOCK_N, COPY)
            query = number * BLOCK_Q + member // GROUP
            place = gl.expand_dims((token + query).to(gl.int64) * q_stride + head, 1) + dim
            async_copy.async_copy_global_to_shared(q_smem, q_ptr + place, mask=gl.expand_dims(query < num_queries, 1))
            copy_keys(k_smem.index(last % 2), k_head, block, cache, last, True, OFFSET_STRIDE, D, BS, BLOCK_N, COPY)
            async_copy.commit_group()
        o = warpgroup_mma_wait(0, deps=[o_later])
        o = o / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT)), 1)
        query = tile * BLOCK_Q + member // GROUP
        place = gl.expand_dims((token + query).to(gl.int64) * (H * D) + head, 1) + dim
        keep = gl.expand_dims(query < num_queries, 1)
        gl.store(out_ptr + place, gl.convert_layout(o.to(dtype), LOAD), mask=keep)
        tile = number
        gl.thread_barrier()  # all warps have read the first values
