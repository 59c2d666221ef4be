"""``mla_decode`` in Gluon for Hopper: latents are copied once into shared memory, where they are factors of both products.

One program an SM takes an equal share of all rows' tiles of latents, one row after the other, so that rows of any lengths fill
the card. A copying warp is some tiles ahead. Two warpgroups multiply: each has half of a tile's keys in the scores, and half of
the latents' columns in the sums, whose 64 rows of 512 would not fit one warpgroup's registers (as FlashMLA has it). Weights go
from one to the other through shared memory. Rows that several programs have a part of are put together by another kernel.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.mla_decode.hopper.triton_merge import LANES, WORTH
from headway.kernels.paged_attention.hopper.triton_prefill import LOG2E, PANEL, find_pages, fold

MEMBERS = gl.constexpr(64)
"""Queries times heads of a program: the rows of a warpgroup's product."""


@gluon.jit
def unit_at(unit, plan, PARTS: gl.constexpr, BLOCK_Q: gl.constexpr):
    """(token of the first query, queries, position of the first, keys that the last one sees, slot) of a unit: BLOCK_Q queries
    of a row. No queries: there is nothing to do. No keys: the output is zeros."""
    query_start_ptr, row_slots_ptr, seq_lens_ptr, num_rows, num_slots, capacity, most_queries = plan
    row = unit // PARTS
    inside = row < num_rows
    begin = gl.load(query_start_ptr + row, mask=inside, other=0)
    count = gl.load(query_start_ptr + row + 1, mask=inside, other=0) - begin
    slot = gl.load(row_slots_ptr + row, mask=inside, other=-1)
    seq_len = gl.minimum(gl.load(seq_lens_ptr + row, mask=inside, other=0), capacity)
    live = (slot >= 0) & (slot < num_slots) & (seq_len > 0)
    first = unit % PARTS * BLOCK_Q
    queries = gl.where(count <= most_queries, gl.maximum(gl.minimum(count - first, BLOCK_Q), 0), 0)
    position = seq_len - count + first
    keys = gl.where(live & (queries > 0), gl.maximum(position + queries, 0), 0)
    return begin + first, queries, position, keys, gl.where(live, slot, 0)


@gluon.jit
def tiles_in(queries, keys, KEYS: gl.constexpr):
    """Tiles of a unit; one for zeros."""
    return gl.where(queries > 0, gl.maximum((keys + KEYS - 1) // KEYS, 1), 0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def share_of(program, width, plan, num_units, PARTS: gl.constexpr, BLOCK_Q: gl.constexpr, KEYS: gl.constexpr):
    """(first unit, its first tile, tiles) of a program's share of all units' tiles; see ``triton_merge.share_tiles``."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, LANES, layout=LAYOUT)
    total = 0
    for start in range(0, num_units, LANES):
        _, queries, _, keys, _ = unit_at(start + lane, plan, PARTS, BLOCK_Q)
        tiles = tiles_in(queries, keys, KEYS)
        total += gl.sum(tiles, axis=0)
    share = gl.maximum((total + width - 1) // width, 1)
    while share * share < total // (WORTH * num_units):
        share = share + 1
    begin = program * share
    unit = 0
    before = 0  # tiles of the units before ``unit``
    passed = 0
    for start in range(0, num_units, LANES):
        _, queries, _, keys, _ = unit_at(start + lane, plan, PARTS, BLOCK_Q)
        tiles = tiles_in(queries, keys, KEYS)
        ends = passed + gl.associative_scan(tiles, 0, add)
        done = ends <= begin
        unit += gl.sum(done.to(gl.int32), axis=0)
        before = gl.maximum(before, gl.max(gl.where(done, ends, 0), axis=0))
        passed += gl.sum(tiles, axis=0)
    return unit, begin - before, gl.minimum(begin + share, total) - begin


@gluon.jit
def copy_queries(q_desc, turned_desc, q_smem, turned_smem, full, token, head):
    """Start copying a unit's queries: those in the latents' space a panel at a time, and their rotated parts."""
    PANELS: gl.constexpr = q_smem.shape[1] // PANEL
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_H: gl.constexpr = q_desc.block_type.shape[1]
    SPACES: gl.constexpr = MEMBERS // (BLOCK_Q * BLOCK_H)  # for so many queries in a panel; the first is used
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    mbarrier.expect(full, (PANELS + 1) * q_desc.block_type.nbytes)
    places = q_smem._reinterpret(q_desc.dtype, [PANELS * SPACES, BLOCK_Q, BLOCK_H, PANEL], LAYOUT)  # noqa: SLF001
    for panel in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(q_desc, [token, head, panel * PANEL], full, places.index(panel * SPACES))
    turned = turned_smem._reinterpret(q_desc.dtype, [SPACES, BLOCK_Q, BLOCK_H, PANEL], LAYOUT)  # noqa: SLF001
    tma.async_copy_global_to_shared(turned_desc, [token, head, 0], full, turned.index(0))


@gluon.jit
def copy_tile(desc, kept, turned, rows, full):
    """Start copying a tile of latents and rotated keys: each page a panel at a time."""
    PANELS: gl.constexpr = kept.shape[1] // PANEL
    PAGE: gl.constexpr = desc.block_type.shape[0]
    PAGES: gl.constexpr = kept.shape[0] // PAGE
    mbarrier.expect(full, (PANELS + 1) * PAGES * desc.block_type.nbytes)
    places = kept._reinterpret(desc.dtype, [PANELS * PAGES, PAGE, PANEL], desc.layout)  # noqa: SLF001
    rest = turned._reinterpret(desc.dtype, [PAGES, PAGE, PANEL], desc.layout)  # noqa: SLF001
    for page in gl.static_range(PAGES):
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(desc, [rows[page], panel * PANEL], full, places.index(panel * PAGES + page))
        tma.async_copy_global_to_shared(desc, [rows[page], PANELS * PANEL], full, rest.index(page))


@gluon.jit
def copy_share(
    q_desc, turned_desc, latent_desc, q_smem, turned_smem, kept_smem, keys_smem, bars, tables_ptr, work, plan, cache,
    PARTS: gl.constexpr, BS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp: queries and latents of a share's units."""
    q_full, q_empty, full, empty = bars
    unit, tile, left = work
    STAGES: gl.constexpr = kept_smem.shape[0]
    KEYS: gl.constexpr = kept_smem.shape[1]
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[0]
    first_head = gl.program_id(0) * q_desc.block_type.shape[1]
    if EARLY:
        gdc_wait()
    slot_count = 0
    pieces = 0
    here = unit_at(unit, plan, PARTS, BLOCK_Q)
    while left > 0:
        token, queries, _, keys, slot = here
        here = unit_at(unit + 1, plan, PARTS, BLOCK_Q)  # takes its time
        stop = gl.minimum(tiles_in(queries, keys, KEYS), tile + left)
        if stop > tile:
            table = tables_ptr + slot.to(gl.int64) * cache[1]
            rows = find_pages(table, tile, cache, 0, keys, BS, KEYS)
            for at in range(tile, stop):
                stage = slot_count % STAGES
                mbarrier.wait(empty.index(stage), ((slot_count // STAGES) & 1) ^ 1)
                copy_tile(latent_desc, kept_smem.index(stage), keys_smem.index(stage), rows, full.index(stage))
                if at == tile:  # behind the tile's copies: queries wait for the unit before to end
                    mbarrier.wait(q_empty, (pieces & 1) ^ 1)
                    copy_queries(q_desc, turned_desc, q_smem, turned_smem, q_full, token, first_head)
                rows = find_pages(table, at + 1, cache, 0, keys, BS, KEYS)
                slot_count += 1
            pieces += 1
        left = left - (stop - tile)
        tile = 0
        unit = unit + 1


@gluon.jit
def clear_rows(kept, places):
    """Zero a tile's latents from row ``places`` on: what lies behind a row's end may be anything, times weight 0."""
    ROWS: gl.constexpr = 16
    PANELS: gl.constexpr = kept.shape[1] // PANEL
    PARTS: gl.constexpr = kept.shape[0] // ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    parts = kept._reinterpret(kept.dtype, [PANELS * PARTS, ROWS, PANEL], gl.NVMMASharedLayout(128, 16, 2))  # noqa: SLF001
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    for part in range(places // ROWS, PARTS):
        for panel in gl.static_range(PANELS):
            place = parts.index(panel * PARTS + part)
            nothing = gl.zeros([ROWS, PANEL], kept.dtype, LAYOUT)
            place.store(gl.where(part * ROWS + row < places, place.load(LAYOUT), nothing))


@gluon.jit
def scores(q_smem, turned_smem, kept, turned, S_LAYOUT: gl.constexpr):
    """Start the products of queries with a tile of latents and rotated keys."""
    KEYS: gl.constexpr = kept.shape[0]
    nothing = gl.zeros([MEMBERS, KEYS], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(q_smem, kept.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma(turned_smem, turned.permute((1, 0)), s, is_async=True)


@gluon.jit
def attend_tiles(
    q_smem, turned_smem, kept_smem, keys_smem, p_smem, bars, tile, stop, slot, keys, newest, factor,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """(sums over the latents [MEMBERS, RANK], sums of weights, greatest scores) of a unit's tiles, which are in the ring's
    slots from ``slot`` on."""
    _, _, full, empty = bars
    STAGES: gl.constexpr = kept_smem.shape[0]
    KEYS: gl.constexpr = kept_smem.shape[1]
    RANK: gl.constexpr = q_smem.shape[1]
    OF_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    o = gl.zeros([MEMBERS, RANK], gl.float32, layout=O_LAYOUT)
    total = gl.zeros([MEMBERS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    top = gl.full([MEMBERS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    for at in range(tile, stop):
        stage = slot % STAGES
        kept = kept_smem.index(stage)
        mbarrier.wait(full.index(stage), (slot // STAGES) & 1)
        s_later = scores(q_smem, turned_smem, kept, keys_smem.index(stage), S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s_later])
        weights, total, top, decay = fold(s, top, total, at * KEYS, newest, factor, True, S_LAYOUT)
        p_smem.store(weights.to(p_smem.dtype))
        if (at + 1) * KEYS > keys:
            clear_rows(kept, keys - at * KEYS)
        o = o * gl.expand_dims(gl.convert_layout(decay, OF_O), 1)
        fence_async_shared()
        gl.thread_barrier()
        o_later = warpgroup_mma(p_smem, kept, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o_later])
        gl.thread_barrier()  # the other warpgroup has read the tile and the weights, too
        mbarrier.arrive(empty.index(stage), count=1)
        slot = slot + 1
    return o, total, top


@gluon.jit
def attend_share(
    out_ptr, partial_ptr, top_ptr, q_smem, turned_smem, kept_smem, keys_smem, p_smem, bars, work, plan, scale,
    num_tokens, H: gl.constexpr, PARTS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_H: gl.constexpr,
):  # fmt: skip
    """Two warpgroups: the outputs of a share's units, or of its parts of them."""
    unit, tile, left = work
    RANK: gl.constexpr = q_smem.shape[1]
    KEYS: gl.constexpr = kept_smem.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    first_head = gl.program_id(0) * BLOCK_H
    program = gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
    member = gl.arange(0, MEMBERS, layout=gl.SliceLayout(1, S_LAYOUT))
    row = gl.arange(0, MEMBERS, layout=gl.SliceLayout(1, O_LAYOUT))
    dim = gl.expand_dims(gl.arange(0, RANK, layout=gl.SliceLayout(0, O_LAYOUT)), 0)
    slot_count = 0
    pieces = 0
    here = unit_at(unit, plan, PARTS, BLOCK_Q)
    while left > 0:
        token, queries, position, keys, _ = here
        here = unit_at(unit + 1, plan, PARTS, BLOCK_Q)  # takes its time
        tiles = tiles_in(queries, keys, KEYS)
        stop = gl.minimum(tiles, tile + left)
        if stop > tile:
            newest = gl.where((member // BLOCK_H < queries) & (keys > 0), position + member // BLOCK_H, -1)
            mbarrier.wait(bars[0], pieces & 1)
            o, total, top = attend_tiles(
                q_smem, turned_smem, kept_smem, keys_smem, p_smem, bars, tile, stop, slot_count, keys, newest,
                scale * LOG2E, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
            mbarrier.arrive(bars[1], count=1)
            slot_count += stop - tile
            pieces += 1
            total = gl.where(total > 0.0, total, 1.0)
            o = o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT)), 1)
            keep = gl.expand_dims((row // BLOCK_H < queries) & (first_head + row % BLOCK_H < H), 1)
            if (tile == 0) & (stop == tiles):
                at = (first_head + row % BLOCK_H).to(gl.int64) * num_tokens + token + row // BLOCK_H
                gl.store(out_ptr + gl.expand_dims(at * RANK, 1) + dim, o.to(out_ptr.dtype.element_ty), mask=keep)
            else:
                part = (2 * program + gl.where(tile > 0, 0, 1)) * (BLOCK_Q * BLOCK_H)
                gl.store(partial_ptr + gl.expand_dims((part + row).to(gl.int64) * RANK, 1) + dim, o, mask=keep)
                gl.store(top_ptr + part + member, top + gl.log2(total), mask=member < BLOCK_Q * BLOCK_H)
        left = left - (stop - tile)
        tile = 0
        unit = unit + 1


@gluon.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_slots", "num_blocks", "table_width", "most_queries"],
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr", "tables_ptr"],
)
def shared_latents_kernel(
    q_desc,  # [T, H, RANK] in blocks of [BLOCK_Q, BLOCK_H, 64]
    turned_desc,  # [T, H, 64]: queries' rotated parts, in the same
    latent_desc,  # [rows, RANK + 64] in blocks of [latents of a page, 64]
    out_ptr,  # [H, T, RANK]
    partial_ptr,  # f32 [programs, 2, BLOCK_Q * BLOCK_H, RANK]: of a unit begun by another program, and of one that another ends
    top_ptr,  # f32 [programs, 2, BLOCK_Q * BLOCK_H], base-2 log of the part's sum of weights
    tables_ptr,  # [S, table_width]
    row_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    num_rows,
    num_tokens,
    num_slots,
    num_blocks,
    table_width,
    most_queries,
    scale,
    block_rows,  # rows of latent_desc from block to block
    H: gl.constexpr,
    RANK: gl.constexpr,
    BS: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_H: gl.constexpr,
    KEYS: gl.constexpr,  # latents of a tile
    STAGES: gl.constexpr,  # tiles that there is memory for
    EARLY: gl.constexpr,
):
    """Grid: blocks of heads x programs that share all tiles; two warpgroups here and a warp beside them."""
    if EARLY:
        gdc_launch_dependents()
    dtype: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [MEMBERS, RANK], SHARED)
    turned_smem = gl.allocate_shared_memory(dtype, [MEMBERS, PANEL], SHARED)
    kept_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, RANK], SHARED)
    keys_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, PANEL], SHARED)
    p_smem = gl.allocate_shared_memory(dtype, [MEMBERS, KEYS], gl.NVMMASharedLayout(2 * KEYS, 16, 2))
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    bars = (q_full, q_empty, full, empty)
    if EARLY:
        gdc_wait()
    plan = (query_start_ptr, row_slots_ptr, seq_lens_ptr, num_rows, num_slots, table_width * BS, most_queries)
    work = share_of(gl.program_id(1), gl.num_programs(1), plan, num_rows * PARTS, PARTS, BLOCK_Q, KEYS)
    cache = (num_blocks, table_width, block_rows, 0)
    gl.warp_specialize(
        [
            (attend_share, (out_ptr, partial_ptr, top_ptr, q_smem, turned_smem, kept_smem, keys_smem, p_smem,
                            bars, work, plan, scale, num_tokens, H, PARTS, BLOCK_Q, BLOCK_H)),
            (copy_share, (q_desc, turned_desc, latent_desc, q_smem, turned_smem, kept_smem, keys_smem, bars, tables_ptr,
                          work, plan, cache, PARTS, BS, EARLY)),
        ],
        [1],
        [96],  # registers a thread of the copying warp, for places of pages; the others get what it leaves
    )  # fmt: skip
