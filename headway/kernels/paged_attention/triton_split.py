"""Splits of decode rows in the Triton kernels: how keys are shared out, and how partial results are weighed."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def lowest_seen(position, size, REACH: tl.constexpr):
    """The first position that a query at ``position`` sees: of a window (REACH 1) or chunk (2) of ``size``, else 0."""
    if REACH == 1:
        return tl.maximum(position - size + 1, 0)
    if REACH == 2:
        return tl.maximum(position, 0) // size * size
    return position * 0


@triton.jit
def sink_weight(sinks_ptr, head, keep, top):
    """The weights of heads' sinks relative to the base-2 logits ``top``; 0 where nothing was seen."""
    sink = tl.load(sinks_ptr + head, mask=keep, other=float("-inf")) * LOG2E
    return tl.where(top == float("-inf"), 0.0, tl.exp2(sink - top))


@triton.jit
def row_tokens(query_start_ptr, row, WIDTH: tl.constexpr):
    """(first token, tokens) of a row of up to WIDTH; with 1 each row is a token."""
    if WIDTH == 1:
        return row.to(tl.int64), 1
    first = tl.maximum(tl.load(query_start_ptr + row), 0)
    count = tl.load(query_start_ptr + row + 1) - first
    return first.to(tl.int64), tl.minimum(tl.maximum(count, 0), WIDTH)


@triton.jit
def own_heads(member, kv_head, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """(head, token of the row) of queries, which lie token by token."""
    if WIDTH == 1:
        return kv_head * GROUP + member, member * 0
    return kv_head * GROUP + member % GROUP, member // GROUP


@triton.jit
def split_plan(seq_len, oldest, window, min_tiles, num_splits, BLOCK_N: tl.constexpr, REACH: tl.constexpr):
    """(first tile, number of tiles, tiles per split, splits in use) of a decode row, from its true length and the position of
    its first query."""
    first = 0
    if REACH > 0:
        first = lowest_seen(tl.maximum(oldest, 0), window, REACH) // BLOCK_N
    tiles = (seq_len + BLOCK_N - 1) // BLOCK_N - first
    wanted = tl.maximum(tl.minimum((tiles + min_tiles - 1) // min_tiles, num_splits), 1)
    share = tl.maximum((tiles + wanted - 1) // wanted, 1)
    return first, tiles, share, (tiles + share - 1) // share


@triton.jit
def counted_plan(row, split, decode_rows_ptr, busy, min_tiles, num_splits):
    """(whether there is work, row, split, tiles per split at least, splits at most) of a program, by the true number of rows.

    Rows that would leave the device idle are split, as ``choose_splits`` does. Their programs come before those without work,
    which otherwise lie between one split of all rows and the next.
    """
    count = tl.minimum(tl.load(decode_rows_ptr), tl.num_programs(1))
    programs = tl.maximum(count, 1) * tl.num_programs(0)
    few = programs < busy
    number = split * tl.num_programs(1) + row
    row = tl.where(few, number % tl.maximum(count, 1), row)
    split = tl.where(few, number // tl.maximum(count, 1), split)
    most = tl.where(few, tl.minimum((busy + programs - 1) // programs, num_splits), num_splits)
    return row < count, row, split, tl.where(few, 1, min_tiles), most


@triton.jit
def clear_idle(
    out_ptr, query_start_ptr, row, num_rows, num_tokens, kv_head,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zeros for WIDTH of the tokens behind all rows, each row's own."""
    first = tl.load(query_start_ptr + num_rows) + row * WIDTH
    member, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first + member // GROUP
    keep = ((member < WIDTH * GROUP) & (token < num_tokens))[:, None] & (dim < D)[None, :]
    place = (token.to(tl.int64) * H + kv_head * GROUP + member % GROUP)[:, None] * D + dim[None, :]
    tl.store(out_ptr + place, 0.0, mask=keep)


@triton.jit
def weigh_splits(
    out_ptr, partial_ptr, top_ptr, first_head, queries, used, num_splits, sinks_ptr,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Outputs of ``queries`` query heads from ``first_head`` (counted over all tokens) on, GROUP of each token, from the
    partial results of their splits; ``sinks_ptr``: at the sink of the first of them."""
    CHUNK: tl.constexpr = 32 // MEMBERS if MEMBERS < 16 else 2
    member = tl.arange(0, MEMBERS)
    head = first_head + member // GROUP * H + member % GROUP
    dim = tl.arange(0, BLOCK_D)
    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, BLOCK_D], tl.float32)
    for start in range(0, used, CHUNK):
        split = start + tl.arange(0, CHUNK)
        keep = (member < queries)[:, None] & (split < used)[None, :]
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
    if SINKS:
        total += sink_weight(sinks_ptr, member % GROUP, member < queries, best)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    keep = (member < queries)[:, None] & (dim < D)[None, :]
    tl.store(out_ptr + head[:, None] * D + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=keep)
