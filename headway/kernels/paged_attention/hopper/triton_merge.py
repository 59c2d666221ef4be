"""Joins the partial softmaxes of decode attention: of a program's warps, and of a row's splits.

The shared memory is raw, named by its address: a store there may leave out the columns that are no query, and one barrier
lies between all stores and all loads.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headway.kernels.triton_cluster import cluster_wait, place_in, pull, pull4, send2, send4, wait_mailbox

PAD = gl.constexpr(8)
"""Floats between rows in shared memory, so that four rows' pairs fall into different banks."""


@gluon.constexpr_function
def room_bytes(warps, rows, size, width=1):
    """Parts [warps, rows, size + PAD] and a row for what nobody wants; tops and totals [warps, rows, 2], also with one more;
    logits [width, rows] of the newest keys."""
    return 4 * ((warps * rows + 1) * (size + PAD + 2) + width * rows)


@gluon.constexpr_function
def merge_layout(parts, size, warps):
    """Threads over [parts, rows, D]: all parts of four neighbours in one thread."""
    lanes = min(size // 4, 32)  # along a head
    return gl.BlockedLayout([parts, 1, 4], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def row_count(group):
    """Rows for ``group`` queries: the next power of two."""
    return 1 << (group - 1).bit_length()


@gluon.constexpr_function
def chunk_of(rows, warps):
    """Splits that are weighed at a time: as many as leave a thread 64 registers for them."""
    return min(8, max(2, 32 * warps // rows // 2))


@gluon.jit
def place_of(row, GROUP: gl.constexpr, STEP: gl.constexpr):
    """Queries lie token by token, GROUP heads of each, and a token's heads ``STEP`` + GROUP apart from the next one's: where
    those of ``row`` lie behind the first."""
    if STEP == 0:
        return row
    else:
        return row + row // GROUP * STEP


@gluon.jit
def put(at, values):
    """Store float32 at addresses ``at`` in shared memory; threads that hold the same value all store it."""
    gl.inline_asm_elementwise(
        "st.shared.f32 [$1], $2; mov.u32 $0, 0;", "=r,r,f", [at, values], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put_pairs(at, values):
    """``put`` of two neighbours at a time."""
    gl.inline_asm_elementwise(
        "st.shared.v2.f32 [$2], {$4, $5}; mov.u32 $0, 0; mov.u32 $1, 0;",
        "=r,=r,r,r,f,f", [at, values], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def cubed(x, first: gl.constexpr, second: gl.constexpr):
    """A vector as a tensor of three dimensions, by two ``expand_dims``."""
    return gl.expand_dims(gl.expand_dims(x, first), second)


@gluon.jit
def upper(x):
    """Rows 0 to 7 of [WARPS, 16, N], which costs nothing: a product's rows r and r + 8 are in one thread."""
    first, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, 8, x.shape[2]]), (0, 2, 3, 1)))
    return first


@gluon.jit
def lower(x):
    """Rows 8 to 15, see ``upper``."""
    _, second = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, 8, x.shape[2]]), (0, 2, 3, 1)))
    return second


@gluon.jit
def stacked(first, second):
    """[WARPS, 16, N] of two times eight rows, which costs nothing either."""
    pairs = gl.permute(gl.join(first, second), (0, 3, 1, 2))
    return gl.reshape(pairs, [first.shape[0], 16, first.shape[2]])


@gluon.jit
def put_own(room, logits, number: gl.constexpr, WARPS: gl.constexpr, D: gl.constexpr):
    """The base-2 logits [ROWS] of newest key ``number`` into the room."""
    ROWS: gl.constexpr = logits.shape[0]
    place = (WARPS * ROWS + 1) * (D + PAD + 2) + number * ROWS
    put(room + 4 * (place + gl.arange(0, ROWS, layout=logits.type.layout)), logits)


@gluon.jit
def put_parts(room, o, top, total, ROWS: gl.constexpr):
    """Each warp's outputs [WARPS, 16, D], tops [WARPS, 8] and totals [WARPS, 16, 8 alike] into the room.

    Rows that are no query all go to one place: stores that leave lanes out would become branches.
    """
    WARPS: gl.constexpr = o.shape[0]
    D: gl.constexpr = o.shape[2]
    o, total = upper(o), upper(total)
    PARTS: gl.constexpr = o.type.layout
    warp = cubed(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, PARTS))), 1, 2)
    row = cubed(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS))), 0, 2)
    dim = cubed(gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARTS))), 0, 1)
    place = gl.where(row < ROWS, warp * ROWS + row, WARPS * ROWS)
    put_pairs(room + (place * (D + PAD) + dim) * 4, o)
    PAIRS: gl.constexpr = total.type.layout
    warp = cubed(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIRS))), 1, 2)
    row = cubed(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS))), 0, 2)
    column = cubed(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, PAIRS))), 0, 1)
    top = gl.expand_dims(gl.convert_layout(top, gl.SliceLayout(2, PAIRS), assert_trivial=True), 2)
    place = gl.where((row < ROWS) & (column < 2), warp * ROWS + row, WARPS * ROWS)
    stats = room + (WARPS * ROWS + 1) * (D + PAD) * 4
    put_pairs(stats + (place * 2 + column % 2) * 4, gl.where(column % 2 == 0, top, total))


@gluon.jit
def merge_warps(room, new_v, mine, WARPS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    """(sums of weighted values [ROWS, D], their base-2 scale [ROWS], sums of weights [ROWS]) of the room's parts and, where
    ``mine``, the WIDTH newest tokens, whose values are ``new_v``, [1, D] each, 0 unless ``mine``.
    """
    LAYOUT: gl.constexpr = merge_layout(WARPS, D, WARPS)
    FLAT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT))
    part = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    place = part * ROWS + gl.expand_dims(rows, 0)
    dim = cubed(gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0, 1)
    stats = room + (WARPS * ROWS + 1) * (D + PAD) * 4
    top = pull(stats + place * 8)
    logits = ()
    for i in gl.static_range(WIDTH):
        own = pull(stats + ((WARPS * ROWS + 1) * 2 + i * ROWS + rows) * 4)
        logits = logits + (gl.where(mine, own, float("-inf")),)  # noqa: RUF005  Triton knows no unpacking
    total = pull(stats + place * 8 + 4)
    o = pull4(room + (gl.expand_dims(place, 2) * (D + PAD) + dim) * 4)
    best = gl.max(top, axis=0)
    for i in gl.static_range(WIDTH):
        best = gl.maximum(best, logits[i])
    shift = gl.where(best == float("-inf"), 0.0, best)
    weights = gl.exp2(top - gl.expand_dims(shift, 0))
    total = gl.sum(total * weights, axis=0)
    o = gl.sum(o * gl.expand_dims(weights, 2), axis=0)
    for i in gl.static_range(WIDTH):
        own = gl.exp2(logits[i] - shift)
        total += own
        o += gl.expand_dims(gl.convert_layout(own, FLAT, assert_trivial=True), 1) * new_v[i].to(gl.float32)
    shift = gl.convert_layout(shift, FLAT, assert_trivial=True)
    return o, shift, gl.convert_layout(total, FLAT, assert_trivial=True)


@gluon.jit
def with_sinks(total, top, sinks_ptr, row, queries, GROUP: gl.constexpr, SINKS: gl.constexpr):
    """Sums of weights relative to the base-2 logits ``top``, the sinks' included. ``row``: of queries, whose heads' sinks are
    from ``sinks_ptr`` on."""
    if SINKS:
        sink = gl.load(sinks_ptr + row % GROUP, mask=row < queries, other=float("-inf")) * 1.4426950408889634
        total += gl.where(total > 0.0, gl.exp2(sink - top), 0.0)  # a row without keys gives zeros
    return total


@gluon.jit
def weigh_splits(out_ptr, partial_ptr, stats_ptr, first_head, queries, used, num_splits, sinks_ptr,
                 GROUP: gl.constexpr, STEP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
                 SINKS: gl.constexpr):  # fmt: skip
    """Outputs of ``queries`` query heads from ``first_head`` (counted over all tokens) on, see ``place_of``, from their splits'
    partial results."""
    CHUNK: gl.constexpr = chunk_of(ROWS, WARPS)
    LAYOUT: gl.constexpr = merge_layout(CHUNK, D, WARPS)
    part = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    dim = cubed(gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0, 1)
    best = gl.full([1, ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(2, LAYOUT))
    total = gl.zeros([1, ROWS], gl.float32, layout=gl.SliceLayout(2, LAYOUT))
    acc = gl.zeros([1, ROWS, D], gl.float32, layout=LAYOUT)
    for start in range(0, used, CHUNK):
        at = (first_head + place_of(row, GROUP, STEP)) * num_splits + start + part
        keep = (row < queries) & (start + part < used)
        top = gl.load(stats_ptr + 2 * at, mask=keep, other=float("-inf"))
        parts_total = gl.load(stats_ptr + 2 * at + 1, mask=keep, other=0.0)
        parts = gl.load(partial_ptr + gl.expand_dims(at, 2) * D + dim, mask=gl.expand_dims(keep, 2), other=0.0)
        new_best = gl.maximum(best, gl.expand_dims(gl.max(top, axis=0), 0))
        shift = gl.where(new_best == float("-inf"), 0.0, new_best)  # rows beyond the group
        weights = gl.exp2(top - shift)
        decay = gl.exp2(best - shift)
        total = total * decay + gl.expand_dims(gl.sum(parts_total * weights, axis=0), 0)
        acc = acc * gl.expand_dims(decay, 2) + gl.expand_dims(gl.sum(parts * gl.expand_dims(weights, 2), axis=0), 0)
        best = new_best
    total = with_sinks(total, best, sinks_ptr, row, queries, GROUP, SINKS)
    result = acc * gl.expand_dims(1.0 / gl.where(total > 0.0, total, 1.0), 2)
    place = gl.expand_dims(first_head + place_of(row, GROUP, STEP), 2)
    keep = gl.expand_dims(row < queries, 2)
    gl.store(out_ptr + place * D + dim, result.to(out_ptr.dtype.element_ty), mask=keep)


@gluon.constexpr_function
def cluster_bytes(cluster, rows, size):
    """16 for the mailbox; sums [cluster, rows, size] and (scale, weights, 0, 0) [cluster, rows, 4]."""
    return 16 + 4 * cluster * rows * (size + 4)


@gluon.constexpr_function
def sent_bytes(rows, size, warps):
    """What a split sends: sums, scales and weights, by every thread that holds them."""
    at_once = max(1, 128 // size) * warps  # rows, which threads beyond them hold again
    return max(1, at_once // rows) * rows * (size + 2) * 4


@gluon.jit
def weigh_cluster(merged, out_ptr, room, first_head, queries, split, used, sinks_ptr,
                  CLUSTER: gl.constexpr, GROUP: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr,
                  SINKS: gl.constexpr):  # fmt: skip
    """``weigh_splits`` where all splits run in one cluster: each pushes its sums to the first, which stores the outputs."""
    result, shift, total = merged
    ROWS: gl.constexpr = result.shape[0]
    D: gl.constexpr = result.shape[1]
    FLAT: gl.constexpr = result.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, FLAT))
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, FLAT)), 0)
    place = gl.expand_dims(split * ROWS + row, 1)
    none = gl.zeros([ROWS, D], gl.int32, layout=FLAT)
    cluster_wait()  # all programs of the cluster run
    box = place_in(0, room)
    send4(box + 16 + (place * D + dim) * 4, box + none, result)
    pairs = gl.where(dim % 2 == 0, gl.expand_dims(shift, 1), gl.expand_dims(total, 1))
    at = box + 16 + CLUSTER * ROWS * D * 4 + (place * 4 + dim % 4) * 4
    send2(at, box + none, pairs, (dim < 2).to(gl.int32) + none)
    if split == 0:
        wait_mailbox(room)
        weigh_pushed(
            out_ptr, room + 16, first_head, queries, used, sinks_ptr, CLUSTER, GROUP, STEP, ROWS, D, WARPS, SINKS
        )


@gluon.jit
def weigh_pushed(
    out_ptr, room, first_head, queries, used, sinks_ptr,
    CLUSTER: gl.constexpr, GROUP: gl.constexpr, STEP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
    WARPS: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Outputs from the splits' sums in this program's shared memory."""
    stats = room + CLUSTER * ROWS * D * 4
    LAYOUT: gl.constexpr = merge_layout(CLUSTER, D, WARPS)
    part = gl.expand_dims(gl.arange(0, CLUSTER, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
    dim = cubed(gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0, 1)
    place = part * ROWS + row
    keep = part < used
    top = gl.where(keep, pull(stats + place * 16), float("-inf"))
    total = gl.where(keep, pull(stats + place * 16 + 4), 0.0)
    parts = pull4(room + (gl.expand_dims(place, 2) * D + dim) * 4)
    parts = gl.where(gl.expand_dims(keep, 2), parts, 0.0)
    best = gl.max(top, axis=0)
    shift = gl.where(best == float("-inf"), 0.0, best)
    weights = gl.exp2(top - gl.expand_dims(shift, 0))
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    total = with_sinks(gl.sum(total * weights, axis=0), best, sinks_ptr, head, queries, GROUP, SINKS)
    total = gl.convert_layout(total, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)), assert_trivial=True)
    result = gl.sum(parts * gl.expand_dims(weights, 2), axis=0)
    store_outputs(result, total, out_ptr, first_head, queries, GROUP, STEP)


@gluon.jit
def store_outputs(result, total, out_ptr, first_head, queries, GROUP: gl.constexpr, STEP: gl.constexpr):
    """Sums of weighted values [ROWS, D] over the sums of weights [ROWS]."""
    FLAT: gl.constexpr = result.type.layout
    row = gl.expand_dims(gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, FLAT)), 1)
    dim = gl.expand_dims(gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, FLAT)), 0)
    result = result * gl.expand_dims(1.0 / gl.where(total > 0.0, total, 1.0), 1)
    at = (first_head + place_of(row, GROUP, STEP)) * result.shape[1] + dim
    gl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=row < queries)


@gluon.jit
def finish(
    merged, out_ptr, partial_ptr, stats_ptr, arrival, mailbox, first_head, queries, split, used, num_splits, sinks_ptr,
    GROUP: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, CLUSTER: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Store the outputs of a row that is not split, else this split's; the split that is done last weighs them all.

    ``merged``: as of ``merge_warps``; ``first_head``, ``queries``: as of ``weigh_splits``.
    """
    result, shift, total = merged
    ROWS: gl.constexpr = result.shape[0]
    D: gl.constexpr = result.shape[1]
    FLAT: gl.constexpr = result.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, FLAT))
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, FLAT)), 0)
    keep = gl.expand_dims(row < queries, 1)
    if used <= 1:
        total = with_sinks(total, shift, sinks_ptr, row, queries, GROUP, SINKS)
        store_outputs(result, total, out_ptr, first_head, queries, GROUP, STEP)
    elif used <= CLUSTER:
        weigh_cluster(
            merged, out_ptr, mailbox, first_head, queries, split, used, sinks_ptr, CLUSTER, GROUP, STEP, WARPS, SINKS
        )
    else:
        part = (first_head + place_of(row, GROUP, STEP)) * num_splits + split
        gl.store(partial_ptr + gl.expand_dims(part, 1) * D + dim, result, mask=keep)
        gl.store(stats_ptr + 2 * part, shift, mask=row < queries)
        gl.store(stats_ptr + 2 * part + 1, total, mask=row < queries)
        gl.thread_barrier()  # all threads' parts are stored before one thread says so
        if gl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
            gl.store(arrival, 0)
            weigh_splits(
                out_ptr, partial_ptr, stats_ptr, first_head, queries, used, num_splits, sinks_ptr,
                GROUP, STEP, ROWS, D, WARPS, SINKS,
            )  # fmt: skip
