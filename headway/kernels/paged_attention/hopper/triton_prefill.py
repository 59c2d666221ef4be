"""Prefill attention for Hopper by specialised warps: one warp copies, two warpgroups multiply and fold.

The unit of work is ``BLOCK_M`` (queries x heads of one KV head) of a row; its keys are gone through from the last tile to the
first. One program a processor takes unit after unit. Its copying warp fills rings of key and value tiles page by page with
tensor copies, as far ahead as there is room, into the next unit too. Each warpgroup has half of the queries: in each turn it
starts S = Q K^T of a tile and O += P V of the tile before, waits for S alone, and does the softmax of S while O is still being
summed; while one warpgroup folds, the other one's products run (the scheme of Shah et al., FlashAttention-3, 2024).

This is Gluon, Triton's lower-level language: Triton itself waits for a product before anything else touches registers.
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

from headway.kernels.paged_attention.hopper.triton_factors import as_factor

LOG2E = gl.constexpr(1.4426950408889634)
PANEL = gl.constexpr(64)
"""16-bit columns of a swizzled row of shared memory; wider matrices lie there panel by panel."""
PADS = gl.constexpr(8)
"""Units of a KV head that share the padding behind the last row."""


@gluon.jit
def power(x):
    """2 ** x; what is below the normal range becomes zero, which saves three instructions an element."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def hold(total):
    """``total`` (>= 0) itself, but what it is the sum of is computed before a wait for products that follows.

    The assembler moves such a wait up before all arithmetic that does not need it, and nothing would overlap. It moves no
    wait before a store, so here is one, which never happens.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; setp.lt.f32 p, $1, 0f00000000; mov.b32 a, 0; @p st.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def row_plan(
    query_start_ptr, row_slots_ptr, seq_lens_ptr, decode_rows_ptr, num_tokens, num_rows, num_decode_rows, num_slots,
    table_width, BS: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """What finds a program's rows: those behind the ones that another kernel serves."""
    first_row = num_decode_rows
    if COUNTED:
        first_row = gl.maximum(gl.minimum(gl.load(decode_rows_ptr), num_decode_rows), 0)
    most_rows = num_rows - num_decode_rows
    capacity = table_width * BS
    return query_start_ptr, row_slots_ptr, seq_lens_ptr, num_tokens, num_rows, first_row, most_rows, num_slots, capacity


@gluon.jit
def find_unit(number, num_units, plan, KH: gl.constexpr, BLOCK_Q: gl.constexpr):
    """(first token, queries, slot, context, KV head, tile, rank, step) of a unit.

    The latest tiles of all rows come first: they see most keys. Tile -1: nothing to attend to. Context 0: every ``step``-th
    tile from ``rank`` on is zeros.
    """
    query_start_ptr, row_slots_ptr, seq_lens_ptr, num_tokens, num_rows, first_row, most_rows, num_slots, capacity = plan
    live = number < num_units
    wide = most_rows * KH
    real = (num_units // KH - PADS) * KH  # the others are the padding's
    is_pad = number >= real
    rank = gl.where(is_pad, (number - real) // KH, number // wide)
    step = gl.where(is_pad, PADS, real // wide)
    row = gl.where(is_pad, num_rows, first_row + (number % wide) // KH)
    has_row = live & (row < num_rows)
    token = gl.maximum(gl.load(query_start_ptr + row, mask=live, other=0), 0)
    token_end = gl.load(query_start_ptr + row + 1, mask=has_row, other=num_tokens)
    slot = gl.load(row_slots_ptr + row, mask=has_row, other=-1)
    seq_len = gl.load(seq_lens_ptr + row, mask=has_row, other=0)
    num_queries = gl.minimum(token_end, num_tokens) - token
    known = (slot >= 0) & (slot < num_slots)
    seq_len = gl.where(known, gl.minimum(seq_len, capacity), 0)
    seq_len = gl.where(seq_len < num_queries, 0, seq_len)
    tile = (num_queries + BLOCK_Q - 1) // BLOCK_Q - 1 - rank
    tile = gl.where(seq_len > 0, tile, -1)
    return token, num_queries, gl.where(known, slot, 0), seq_len, number % KH, tile, rank, step


@gluon.jit
def put_numbers(places, numbers, COUNT: gl.constexpr):
    """Leave scalars in shared memory [COUNT, 1]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(COUNT):
        places.index(i).store(gl.full([1], numbers[i], gl.int32, layout=LAYOUT))


@gluon.jit
def get_number(places, i):
    return gl.sum(places.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)


@gluon.jit
def tile_bounds(tile, num_queries, seq_len, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr):
    """(position of its first query, tile of keys that holds its last query's own) of a tile of queries."""
    offset = seq_len - num_queries
    return offset + tile * BLOCK_Q, (offset + gl.minimum((tile + 1) * BLOCK_Q, num_queries) - 1) // BLOCK_N


@gluon.jit
def find_pages(table, tile, cache, kv_head, seq_len, BS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows of the flat cache where a tile's pages begin; block 0's where there is none."""
    num_blocks, _, block_rows, head_rows = cache
    PAGE: gl.constexpr = BS if BS < BLOCK_N else BLOCK_N
    rows = ()
    for page in gl.static_range(BLOCK_N // PAGE):
        position = tile * BLOCK_N + page * PAGE
        block = gl.load(table + position // BS, mask=(position >= 0) & (position < seq_len), other=0)
        block = gl.where((block >= 0) & (block < num_blocks), block, 0)
        inside = 0
        if BS > BLOCK_N:
            inside = position % BS
        rows = rows + (block * block_rows + kv_head * head_rows + inside,)  # noqa: RUF005
    return rows


@gluon.jit
def copy_pages(desc, target, rows, full, D: gl.constexpr, BLOCK_N: gl.constexpr):
    """Start copying a tile of keys or values: each page a panel at a time."""
    PAGE: gl.constexpr = desc.block_type.shape[0]
    PAGES: gl.constexpr = BLOCK_N // PAGE
    PANELS: gl.constexpr = D // PANEL
    places = target._reinterpret(desc.dtype, [PANELS * PAGES, PAGE, PANEL], desc.layout)  # noqa: SLF001
    mbarrier.expect(full, PAGES * PANELS * desc.block_type.nbytes)
    for page in gl.static_range(PAGES):
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(desc, [rows[page], panel * PANEL], full, places.index(panel * PAGES + page))


@gluon.jit
def copy_units(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, numbers, tables_ptr, counter_ptr, cache, plan, num_units,
    GROUP: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The copying warp: queries, keys and values of all units of its program."""
    q_full, q_empty, full, empty = bars
    STAGES: gl.constexpr = k_smem.shape[0]
    SHARE: gl.constexpr = q_smem.shape[1] // GROUP  # queries of a warpgroup
    PANELS: gl.constexpr = D // PANEL
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    width = gl.num_programs(0)
    slot_count = 0  # see ``attend``
    units = 0
    number = gl.program_id(0)
    ahead = width + gl.atomic_add(counter_ptr, 1)
    unit = find_unit(number, num_units, plan, KH, 2 * SHARE)
    while number < num_units:
        token, num_queries, slot, seq_len, kv_head, tile, rank, step = unit
        number = ahead
        ahead = width + gl.atomic_add(counter_ptr, 1)  # takes its time, as do the loads of the next unit
        unit = find_unit(number, num_units, plan, KH, 2 * SHARE)
        position, last = tile_bounds(tile, num_queries, seq_len, 2 * SHARE, BLOCK_N)
        if tile >= 0:
            table = tables_ptr + slot.to(gl.int64) * cache[1]
            rows = find_pages(table, last, cache, kv_head, seq_len, BS, BLOCK_N)
            mbarrier.wait(q_empty, (units & 1) ^ 1)
            put_numbers(numbers, (last, token, num_queries, kv_head, tile, 0, position, seq_len), 8)
            mbarrier.expect(q_full, 2 * PANELS * q_desc.block_type.nbytes)
            for half in gl.static_range(2):
                places = q_smem.index(half)._reinterpret(q_desc.dtype, [PANELS, SHARE, GROUP, PANEL], LAYOUT)  # noqa: SLF001
                for panel in gl.static_range(PANELS):
                    begin = [token + (2 * tile + half) * SHARE, kv_head * GROUP, panel * PANEL]
                    tma.async_copy_global_to_shared(q_desc, begin, q_full, places.index(panel))
            units += 1
            # Not ``rows``: Triton 3.6 would take two names of one value for one, in all turns of the loop.
            rows_before = find_pages(table, -1, cache, kv_head, seq_len, BS, BLOCK_N)
            for back in range(last + 2):
                stage = slot_count % STAGES
                mbarrier.wait(empty.index(stage), ((slot_count // STAGES) & 1) ^ 1)
                if back <= last:
                    copy_pages(k_desc, k_smem.index(stage), rows, full.index(stage), D, BLOCK_N)
                else:
                    mbarrier.arrive(full.index(stage), count=1)
                if back > 0:
                    copy_pages(v_desc, v_smem.index(stage), rows_before, full.index(stage), D, BLOCK_N)
                else:
                    mbarrier.arrive(full.index(stage), count=1)
                rows_before = rows
                rows = find_pages(table, last - back - 1, cache, kv_head, seq_len, BS, BLOCK_N)
                slot_count += 1
        elif (seq_len == 0) & (rank * 2 * SHARE < num_queries):
            mbarrier.wait(q_empty, (units & 1) ^ 1)
            put_numbers(numbers, (-1, token, num_queries, kv_head, rank, step, 0, 0), 8)
            mbarrier.arrive(q_full, count=1)
            units += 1
    if ahead == num_units + 2 * width - 1:  # the last number that anyone draws
        gl.store(counter_ptr, 0)
    mbarrier.wait(q_empty, (units & 1) ^ 1)
    put_numbers(numbers, (-2, 0, 0, 0, 0, 0, 0, 0), 8)
    mbarrier.arrive(q_full, count=1)


@gluon.jit
def fold(s, top, total, first, q_position, factor, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Online softmax of a tile's logits: (weights, sum of weights, running maximum, decay of what came before)."""
    BLOCK_N: gl.constexpr = s.shape[1]
    if MASKED:
        key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        s = gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(q_position, 1), s, float("-inf"))
    top_before = top
    top = gl.maximum(top, gl.max(s, axis=1) * factor)
    shift = top
    if MASKED:
        shift = gl.where(top == float("-inf"), 0.0, top)  # a query that has seen nothing yet
    weights = power(s * factor - gl.expand_dims(shift, 1))
    decay = power(top_before - shift)
    return weights, total * decay + gl.sum(weights, axis=1), top, decay


@gluon.jit
def step_back(
    q, k_smem, v_smem, bars, o, p, top, total, slot, first, q_position, factor,
    MASKED: gl.constexpr, WHICH: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Logits and weights of the keys in a slot, from position ``first`` on, beside the values that came with them."""
    _, _, full, empty = bars
    STAGES: gl.constexpr = k_smem.shape[0]
    ROWS: gl.constexpr = o.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    stage = slot % STAGES
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S_LAYOUT)
    mbarrier.wait(full.index(stage), (slot // STAGES) & 1)
    s_later = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    o_later = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_later])
    weights, total, top, decay = fold(s, top, total, first, q_position, factor, MASKED, S_LAYOUT)
    p_next = gl.convert_layout(weights.to(p.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    total = hold(total)
    o = warpgroup_mma_wait(0, deps=[o_later])
    mbarrier.arrive(empty.index(stage), count=1)
    o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT)), 1)
    return o, p_next, top, total


@gluon.jit
def clear_behind(values, places):
    """Zero a tile of values from its row ``places`` on: what lies behind a row's end may be anything, times weight 0."""
    ROWS: gl.constexpr = 16
    BLOCK_N: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PANELS: gl.constexpr = values.shape[1] // PANEL
    PARTS: gl.constexpr = BLOCK_N // ROWS
    parts = values._reinterpret(values.dtype, [PANELS * PARTS, ROWS, PANEL], gl.NVMMASharedLayout(128, 16, 2))  # noqa: SLF001
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    for part in range(places // ROWS, PARTS):
        for panel in gl.static_range(PANELS):
            place = parts.index(panel * PARTS + part)
            kept = gl.where(
                part * ROWS + row < places, place.load(LAYOUT), gl.zeros([ROWS, PANEL], values.dtype, LAYOUT)
            )
            place.store(kept)
    fence_async_shared()
    gl.thread_barrier()  # the other warpgroup writes the same bytes


@gluon.jit
def attend(
    q_smem, k_smem, v_smem, bars, position, last, seq_len, slot, factor, GROUP: gl.constexpr,
    WHICH: gl.constexpr, KEPT: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """A warpgroup's share of a unit whose first query is at ``position`` and whose last tile of keys is ``last``.

    From ``slot`` on it has ``last + 2`` slots of the ring: each holds a tile's keys and the values of the tile before, so the
    first has no values and the last no keys.
    """
    _, q_empty, full, empty = bars
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    ROWS: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    o = gl.zeros([ROWS, D], gl.float32, layout=O_LAYOUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    q_position = position + (WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))) // GROUP
    num_full = (position + 1) // BLOCK_N  # tiles below the diagonal, seen whole by every query
    stage = slot % STAGES
    q = q_smem.index(WHICH)
    if KEPT:
        q = q_smem.index(WHICH).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        fence_async_shared()
        mbarrier.arrive(q_empty, count=1)
        if k_smem.dtype != q_smem.dtype:
            q = as_factor(q, k_smem.dtype)
    mbarrier.wait(full.index(stage), (slot // STAGES) & 1)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S_LAYOUT)
    s_later = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_later])
    mbarrier.arrive(empty.index(stage), count=1)
    weights, total, top, _decay = fold(s, top, total, last * BLOCK_N, q_position, factor, True, S_LAYOUT)
    p = gl.convert_layout(weights.to(k_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    if (last + 1) * BLOCK_N > seq_len:
        mbarrier.wait(full.index((slot + 1) % STAGES), ((slot + 1) // STAGES) & 1)
        clear_behind(v_smem.index((slot + 1) % STAGES), seq_len - last * BLOCK_N)
    for back in range(1, last - num_full + 1):
        o, p, top, total = step_back(
            q, k_smem, v_smem, bars, o, p, top, total, slot + back, (last - back) * BLOCK_N,
            q_position, factor, True, WHICH, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    for back in range(last - gl.minimum(last, num_full) + 1, last + 1):
        o, p, top, total = step_back(
            q, k_smem, v_smem, bars, o, p, top, total, slot + back, 0,
            q_position, factor, False, WHICH, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    if not KEPT:
        mbarrier.arrive(q_empty, count=1)
    slot = slot + last + 1
    stage = slot % STAGES
    mbarrier.wait(full.index(stage), (slot // STAGES) & 1)
    o_later = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o_later])
    mbarrier.arrive(empty.index(stage), count=1)
    return o * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT)), 1)


@gluon.jit
def attend_units(
    out_ptr, q_smem, o_smem, k_smem, v_smem, bars, numbers, scale, GROUP: gl.constexpr, KH: gl.constexpr,
    WHICH: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its share of all units of its program."""
    q_full, q_empty, _, _ = bars
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    ROWS: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    BLOCK_Q: gl.constexpr = 2 * ROWS // GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes of a head to a thread
    member = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, STORE)), 0)
    slot_count = 0  # see ``attend``
    units = 0
    mbarrier.wait(q_full, 0)
    last = get_number(numbers, 0)
    while last > -2:
        token = get_number(numbers, 1)
        num_queries = get_number(numbers, 2)
        head = (get_number(numbers, 3) * GROUP + member % GROUP) * D
        tile = get_number(numbers, 4)
        if last < 0:  # a zombie or padding, which may have more tiles than any row
            step = get_number(numbers, 5)
            mbarrier.arrive(q_empty, count=1)
            for empty in range(tile, (num_queries + BLOCK_Q - 1) // BLOCK_Q, step):
                query = empty * BLOCK_Q + member // GROUP
                place = gl.expand_dims((token + query).to(gl.int64) * (KH * GROUP * D) + head, 1) + dim
                nothing = gl.zeros([ROWS, D], q_smem.dtype, layout=STORE)
                gl.store(out_ptr + place, nothing, mask=gl.expand_dims(query < num_queries, 1))
        else:
            o = attend(
                q_smem, k_smem, v_smem, bars, get_number(numbers, 6), last, get_number(numbers, 7), slot_count,
                scale * LOG2E, GROUP, WHICH, KEPT, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
            o_smem.index(WHICH).store(o.to(q_smem.dtype))  # shared memory turns it for whole rows
            gl.thread_barrier()
            query = tile * BLOCK_Q + member // GROUP
            place = gl.expand_dims((token + query).to(gl.int64) * (KH * GROUP * D) + head, 1) + dim
            rows = o_smem.index(WHICH).load(STORE)
            gl.store(out_ptr + place, rows, mask=gl.expand_dims(query < num_queries, 1))
            slot_count += last + 2
        units += 1
        mbarrier.wait(q_full, units & 1)
        last = get_number(numbers, 0)


@gluon.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_decode_rows", "num_blocks", "num_slots", "num_units"],
    do_not_specialize_on_alignment=[
        "counter_ptr",
        "row_slots_ptr",
        "query_start_ptr",
        "seq_lens_ptr",
        "tables_ptr",
        "decode_rows_ptr",
    ],
)
def overlapped_prefill_kernel(
    q_desc,  # [T, H, D] in blocks of [a warpgroup's queries, GROUP, 64]
    k_desc,  # [rows of a head, D] in blocks of [keys of a page, 64]
    v_desc,
    out_ptr,  # [T, H, D]
    tables_ptr,  # [S, table_width]
    row_slots_ptr, query_start_ptr, seq_lens_ptr,
    counter_ptr,  # zero before and after: the next unit but those that programs begin with
    decode_rows_ptr,  # [1], with COUNTED
    num_tokens, num_rows,
    num_decode_rows,  # leading rows of one token each, for another kernel; at most, with COUNTED
    num_slots, num_blocks, table_width,
    num_units,  # KH x (most rows behind the decode rows x most tiles of a row, and PADS)
    scale,
    block_rows,  # rows of k_desc from block to block
    head_rows,  # and from head to head
    KH: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, KEPT: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """Grid: one program a processor, of one warpgroup here and five warps beside it."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q_desc.dtype
    GROUP: gl.constexpr = q_desc.block_type.shape[1]
    ROWS: gl.constexpr = q_desc.block_type.shape[0] * GROUP
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], SHARED)
    o_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], SHARED)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SHARED)
    numbers = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # keys and values
        mbarrier.init(empty.index(stage), count=2)  # both warpgroups
    fence_async_shared()
    bars = (q_full, q_empty, full, empty)
    plan = row_plan(
        query_start_ptr, row_slots_ptr, seq_lens_ptr, decode_rows_ptr, num_tokens, num_rows, num_decode_rows, num_slots,
        table_width, BS, COUNTED,
    )  # fmt: skip
    cache = (num_blocks, table_width, block_rows, head_rows)
    gl.warp_specialize(
        [
            (attend_units, (out_ptr, q_smem, o_smem, k_smem, v_smem, bars, numbers, scale, GROUP, KH, 0, KEPT)),
            (attend_units, (out_ptr, q_smem, o_smem, k_smem, v_smem, bars, numbers, scale, GROUP, KH, 1, KEPT)),
            (copy_units, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, numbers, tables_ptr, counter_ptr,
                          cache, plan, num_units, GROUP, KH, D, BS, BLOCK_N)),
        ],
        [4, 1],
        [224, 56],  # registers a thread; the first partition gets 224 too
    )  # fmt: skip
