"""Puts rows of latent attention together that several programs of ``shared_latents_kernel`` have a part of."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.mla_decode.triton import MERGED, find_queries, weigh_parts
from headway.kernels.triton_early import start_next, wait_for_inputs

LANES = tl.constexpr(256)
"""Units that are looked at together."""
WORTH = tl.constexpr(8)
"""Parts of a unit that take as long to write and to put together as a tile of latents takes."""


@triton.jit
def share_tiles(total, width, num_units):
    """Tiles that each of ``width`` programs has of ``total``. A part of a unit is written and read once more, WORTH parts
    taking as long as a tile, so that a share is at least the square root of a unit's mean over WORTH."""
    share = tl.maximum((total + width - 1) // width, 1)
    while share * share < total // (WORTH * num_units):
        share += 1
    return share


@triton.jit
def unit_tiles(
    unit, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_rows, num_slots, most_len, most_queries,
    PARTS: tl.constexpr, BLOCK_Q: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(token, queries, tiles) of units, as ``shared_latents_kernel`` counts them."""
    token, queries, _, keys, _ = find_queries(
        unit, query_start_ptr, row_slots_ptr, seq_lens_ptr, row_slots_ptr, num_rows, num_slots, most_len, most_queries,
        0, 0, PARTS, BLOCK_Q, False,
    )  # fmt: skip
    return token, queries, tl.where(queries > 0, tl.maximum((keys + KEYS - 1) // KEYS, 1), 0)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_slots", "table_width", "width", "most_queries"],
    do_not_specialize_on_alignment=["row_slots_ptr", "query_start_ptr", "seq_lens_ptr"],
)
def merge_shares_kernel(
    out_ptr,  # [H, T, RANK]
    partial_ptr,  # f32 [programs, 2, BLOCK_Q * BLOCK_H, RANK]
    top_ptr,  # f32 [programs, 2, BLOCK_Q * BLOCK_H]
    row_slots_ptr, query_start_ptr, seq_lens_ptr,
    num_rows, num_tokens, num_slots, table_width, width, most_queries,
    RANK: tl.constexpr,
    BS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: heads x queries that units have room for. ``width``: programs that share all tiles of a block of heads."""
    start_next(EARLY)
    head = tl.program_id(0)
    unit, nth = tl.program_id(1) // BLOCK_Q, tl.program_id(1) % BLOCK_Q
    wait_for_inputs(EARLY)
    total, begin = 0, 0
    for start in range(0, num_rows * PARTS, LANES):
        each = start + tl.arange(0, LANES)
        _, _, tiles = unit_tiles(
            each, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_rows, num_slots, table_width * BS, most_queries,
            PARTS, BLOCK_Q, KEYS,
        )  # fmt: skip
        total += tl.sum(tiles, axis=0)
        begin += tl.sum(tl.where(each < unit, tiles, 0), axis=0)
    token, queries, tiles = unit_tiles(
        unit, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_rows, num_slots, table_width * BS, most_queries, PARTS,
        BLOCK_Q, KEYS,
    )  # fmt: skip
    share = share_tiles(total, width, num_rows * PARTS)
    first, last = begin // share, (begin + tiles - 1) // share
    if (nth >= queries) | (first == last):
        return
    member = nth * BLOCK_H + head % BLOCK_H
    programs = (head // BLOCK_H) * width
    dim = tl.arange(0, RANK)
    acc = tl.zeros([RANK], tl.float32)
    weighed = 0.0
    best = float("-inf")
    lane = tl.arange(0, MERGED)
    for start in range(first, last + 1, MERGED):
        program = start + lane
        there = program <= last
        begun = program * share > begin  # by the program before
        part = (2 * (programs + program) + tl.where(begun, 0, 1)) * (BLOCK_Q * BLOCK_H) + member
        top = tl.load(top_ptr + part, mask=there, other=float("-inf"))
        at_part = partial_ptr + part.to(tl.int64)[:, None] * RANK + dim[None, :]
        values = tl.load(at_part, mask=there[:, None], other=0.0)
        acc, weighed, best = weigh_parts(acc, weighed, best, top, values)
    result = acc / tl.where(weighed > 0.0, weighed, 1.0)
    at = (head.to(tl.int64) * num_tokens + token + nth) * RANK + dim
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty))
