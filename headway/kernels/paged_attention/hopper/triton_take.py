"""What a program of decode attention takes of its row's projections: queries, and the newest keys and values.

A row of drafts has several tokens. Its queries lie token by token, and what they see of the row's own keys is in no cache yet:
each program that has the row's last keys turns these, too, and multiplies them with its queries number by number, while
earlier keys are on their way. Of several programs that have them the first one writes them to the cache.

A layer that shares another one's keys (STORED) has projected queries alone. An earlier kernel of the same step has written the
newest keys and values, so they are loaded from the cache behind the wait, where other layers load them from the projections.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from headway.kernels.paged_attention.hopper.triton_factors import share_queries
from headway.kernels.paged_attention.hopper.triton_merge import merge_layout, put_own
from headway.kernels.triton_cached import as_cached

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def tokens_of(width, group):
    """Of rows of up to ``width`` tokens, those whose queries a program has: whole tokens, in eight rows of a product."""
    return min(width, 8 // group)


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
def row_tokens(query_start_ptr, row, WIDTH: gl.constexpr):
    """(first token, tokens) of a row; with WIDTH 1 each row is a token."""
    if WIDTH == 1:
        return row, 1
    else:
        first = gl.maximum(gl.load(query_start_ptr + row), 0)
        return first, gl.minimum(gl.maximum(gl.load(query_start_ptr + row + 1) - first, 0), WIDTH)


@gluon.jit
def cache_place(kv_slot, mine, num_blocks, block_stride, OFFSET_STRIDE: gl.constexpr, BS: gl.constexpr):
    """(whether to write or read the newest key and value, where in a head's cache)."""
    write = mine & (kv_slot >= 0) & (kv_slot < num_blocks * BS)
    slot = gl.where(write, kv_slot, 0)
    return write, (slot // BS).to(gl.int64) * block_stride + (slot % BS) * OFFSET_STRIDE


@gluon.jit
def cache_places(kv_slots_ptr, first, tokens, owns, num_blocks, block_stride, OFFSET_STRIDE: gl.constexpr, BS: gl.constexpr,
                 WIDTH: gl.constexpr):  # fmt: skip
    """``cache_place`` of each of a row's tokens, which the program writes or reads where it ``owns`` them."""
    places = ()
    for i in gl.static_range(WIDTH):
        slot = gl.load(kv_slots_ptr + first + i, mask=i < tokens, other=-1)
        places = places + (cache_place(slot, owns, num_blocks, block_stride, OFFSET_STRIDE, BS),)  # noqa: RUF005
    return places


@gluon.jit
def load_position(positions_ptr, at, keep, num_positions):
    """Of tokens, within the table of angles."""
    return gl.minimum(gl.maximum(gl.load(positions_ptr + at, mask=keep, other=0), 0), num_positions - 1)


@gluon.jit
def load_turns(
    cos_sin_ptr, positions_ptr, num_positions, first, offset, tokens, q_norm_ptr, k_norm_ptr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, WIDTH: gl.constexpr,
    Q_NORM: gl.constexpr, K_NORM: gl.constexpr,
):  # fmt: skip
    """Angles of the queries, of each newest key, and weights of both norms, all as halves: [1, D / 2], but for queries of
    several tokens, the first of which is the row's token ``offset``. The angles again for a norm that there is not."""
    HEADS: gl.constexpr = head_layout(D, WARPS)
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEADS)), 0)
    turns = ()
    for i in gl.static_range(WIDTH):
        position = load_position(positions_ptr, first + i, i < tokens, num_positions)
        turns = turns + (load_halves(cos_sin_ptr + position.to(gl.int64) * D, half, half < D, D),)  # noqa: RUF005
    own, q_norm, k_norm = turns[0], turns[0], turns[0]
    if WIDTH > 1:
        token = offset + gl.arange(0, ROWS, layout=gl.SliceLayout(1, HEADS)) // GROUP
        position = load_position(positions_ptr, first + token, token < tokens, num_positions)
        own = load_halves(cos_sin_ptr, gl.expand_dims(position.to(gl.int64) * D, 1) + half, half < D, D)
    if Q_NORM:
        q_norm = load_halves(q_norm_ptr, half, half < D, D)
    if K_NORM:
        k_norm = load_halves(k_norm_ptr, half, half < D, D)
    return own, turns, q_norm, k_norm


@gluon.jit
def load_queries(row_ptr, stride, kv_head, offset, tokens, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
                 WARPS: gl.constexpr, WIDTH: gl.constexpr):  # fmt: skip
    """Halves [ROWS, D / 2] of a program's queries, token by token; zeros behind the row's last one."""
    HEADS: gl.constexpr = head_layout(D, WARPS)
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEADS)), 0)
    query = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, HEADS)), 1)
    if WIDTH == 1:
        return load_halves(row_ptr, (kv_head * GROUP + query) * D + half, query < GROUP, D)
    else:
        token = offset + query // GROUP
        keep = (query < tokens_of(WIDTH, GROUP) * GROUP) & (token < tokens)
        return load_halves(row_ptr, token * stride + (kv_head * GROUP + query % GROUP) * D + half, keep, D)


@gluon.jit
def put_keys(
    q, keys, values, heads, places, room, offset, position, scale, soft_cap, window,
    GROUP: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, WIDTH: gl.constexpr, STORED: gl.constexpr, CAPPED: gl.constexpr,
    REACH: gl.constexpr,
):  # fmt: skip
    """A row's newest keys, in halves [1, D / 2], and values [1, D] to the cache at ``places``, unless they are STORED there;
    the logits that queries ``q``, in halves [ROWS, D / 2], have with the keys into the room."""
    HEADS: gl.constexpr = head_layout(D, WARPS)
    VALUES: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS, D, WARPS))
    q_low, q_high = q
    k_head, v_head = heads
    cached: gl.constexpr = k_head.dtype.element_ty
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEADS)), 0)
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, VALUES)), 0)
    for i in gl.static_range(WIDTH):
        k_low, k_high = keys[i]
        if not STORED:
            k_low, k_high = as_cached(k_low, cached), as_cached(k_high, cached)
            write, at = places[i]
            gl.store(k_head + at + half, k_low, mask=write & (half < D))
            gl.store(k_head + at + D // 2 + half, k_high, mask=write & (half < D))
            gl.store(v_head + at + dim, values[i], mask=write & (dim < D))
        products = q_low.to(gl.float32) * k_low.to(gl.float32) + q_high.to(gl.float32) * k_high.to(gl.float32)
        logits = base_2(gl.sum(products, axis=1), scale, soft_cap, CAPPED)
        if WIDTH > 1:
            token = offset + gl.arange(0, q_low.shape[0], layout=gl.SliceLayout(1, HEADS)) // GROUP
            seen = i <= token
            if REACH > 0:
                seen = seen & (position + i >= lowest_seen(position + token, window, REACH))
            logits = gl.where(seen, logits, float("-inf"))
        put_own(room, logits, i, WARPS, D)


@gluon.jit
def take_row(
    row_ptr, stride, turns, eps, heads, kv_head, mine, offset, tokens, position, places, q_smem, room, scale, soft_cap, window,
    H: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, WIDTH: gl.constexpr,
    STORED: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr, CAPPED: gl.constexpr, REACH: gl.constexpr,
):  # fmt: skip
    """From a row of projections: its queries from token ``offset`` on into shared memory. Where ``mine``, its keys and values
    to the cache at ``places`` and the keys' logits into the room. The values [1, D] as f32, 0 unless ``mine``. With STORED
    keys and values come from ``places``, and values stay as they are cached, which takes fewer registers.

    ``position``: of the row's first token.
    """
    cached: gl.constexpr = heads[0].dtype.element_ty
    HEADS: gl.constexpr = head_layout(D, WARPS)
    VALUES: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS, D, WARPS))
    own, key_turns, q_norm, k_norm = turns
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEADS)), 0)
    dim = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, VALUES)), 0)
    q = load_queries(row_ptr, stride, kv_head, offset, tokens, GROUP, ROWS, D, WARPS, WIDTH)
    new_keys, new_values, keys, values = (), (), (), ()
    for i in gl.static_range(WIDTH):
        if STORED:
            there, at = places[i]
            new_keys = new_keys + (load_halves(heads[0] + at, half, (half < D) & there, D),)  # noqa: RUF005
            new_v = gl.load(heads[1] + at + dim, mask=(dim < D) & there, other=0.0)
        else:
            at = row_ptr + i * stride
            new_keys = new_keys + (load_halves(at, (H + kv_head) * D + half, (half < D) & (i < tokens), D),)  # noqa: RUF005
            there = (dim < D) & mine & (i < tokens)
            new_v = gl.load(at + (H + H // GROUP + kv_head) * D + dim, mask=there, other=0.0)
        new_values = new_values + (new_v,)  # noqa: RUF005
    q_low, q_high = turned(q, own, q_norm, eps, D, Q_NORM)
    if STORED:
        keys = new_keys
    else:
        for i in gl.static_range(WIDTH):
            keys = keys + (turned(new_keys[i], key_turns[i], k_norm, eps, D, K_NORM),)  # noqa: RUF005
    share_queries(q_smem, q_low, q_high, D, WARPS, cached == gl.float8e4nv)
    if STORED:
        values = new_values
    else:
        for i in gl.static_range(WIDTH):
            values = values + (as_cached(new_values[i], cached),)  # noqa: RUF005
    if mine:
        put_keys(
            (q_low, q_high), keys, values, heads, places, room, offset, position, scale, soft_cap, window,
            GROUP, D, WARPS, WIDTH, STORED, CAPPED, REACH,
        )  # fmt: skip
    if STORED:
        return values
    else:
        floats = ()
        for i in gl.static_range(WIDTH):
            floats = floats + (values[i].to(gl.float32),)  # noqa: RUF005
        return floats


@gluon.jit
def take_queries(row_ptr, stride, kv_head, offset, tokens, q_smem, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
                 WARPS: gl.constexpr, WIDTH: gl.constexpr, WORDS: gl.constexpr):  # fmt: skip
    """From a row of queries that are turned: its own into shared memory. The values of no token, as ``take_row``."""
    VALUES: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS, D, WARPS))
    low, high = load_queries(row_ptr, stride, kv_head, offset, tokens, GROUP, ROWS, D, WARPS, WIDTH)
    share_queries(q_smem, low, high, D, WARPS, WORDS)
    nothing = ()
    for i in gl.static_range(WIDTH):  # noqa: B007  Triton knows no _
        nothing = nothing + (gl.expand_dims(gl.zeros([D], gl.float32, layout=gl.SliceLayout(0, VALUES)), 0),)  # noqa: RUF005
    return nothing


@gluon.jit
def take_tokens(
    row_ptr, stride, turn, heads, kv_head, mine, first, offset, tokens, position, num_blocks, block_stride, q_smem, room,
    scale, soft_cap, window, OFFSET_STRIDE: gl.constexpr, BS: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, WIDTH: gl.constexpr, TURNED: gl.constexpr, STORED: gl.constexpr,
    Q_NORM: gl.constexpr, K_NORM: gl.constexpr, CAPPED: gl.constexpr, REACH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """``take_row`` behind the wait for the kernel before, with what no kernel of the step writes ahead of it; ``take_queries``
    with TURNED."""
    if TURNED:
        WORDS: gl.constexpr = heads[0].dtype.element_ty == gl.float8e4nv
        return take_queries(row_ptr, stride, kv_head, offset, tokens, q_smem, GROUP, ROWS, D, WARPS, WIDTH, WORDS)
    else:
        positions_ptr, cos_sin_ptr, num_positions, q_norm_ptr, k_norm_ptr, kv_slots_ptr, eps = turn
        turns = load_turns(
            cos_sin_ptr, positions_ptr, num_positions, first, offset, tokens, q_norm_ptr, k_norm_ptr,
            GROUP, ROWS, D, WARPS, WIDTH, Q_NORM, K_NORM,
        )  # fmt: skip
        owns = mine if STORED else mine & (offset == 0)  # all of several programs read, the first one writes
        places = cache_places(kv_slots_ptr, first, tokens, owns, num_blocks, block_stride, OFFSET_STRIDE, BS, WIDTH)
        if EARLY:
            gdc_wait()
        return take_row(
            row_ptr, stride, turns, eps, heads, kv_head, mine, offset, tokens, position, places, q_smem, room, scale, soft_cap,
            window, H, GROUP, ROWS, D, WARPS, WIDTH, STORED, Q_NORM, K_NORM, CAPPED, REACH,
        )  # fmt: skip


@gluon.jit
def clear_idle(
    out_ptr, first, num_tokens, kv_head, offset,
    H: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Zeros for the tokens from ``first`` + ``offset`` on, behind all rows, that a program would have, were they its row's."""
    HEADS: gl.constexpr = head_layout(D, WARPS)
    half = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEADS)), 0)
    query = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, HEADS)), 1)
    token = offset + query // GROUP
    keep = (query < tokens_of(WIDTH, GROUP) * GROUP) & (token < WIDTH) & (first + token < num_tokens)
    at = ((first + token).to(gl.int64) * H + kv_head * GROUP + query % GROUP) * D + half
    nothing = gl.zeros([ROWS, D // 2], out_ptr.dtype.element_ty, layout=HEADS)
    gl.store(out_ptr + at, nothing, mask=keep)
    gl.store(out_ptr + at + D // 2, nothing, mask=keep)
