"""Tiles of the fused linear layers for few rows for any shape, and how long they should take. Imports no Triton.

What counts is how many bytes of weights are on their way at a time, how evenly programs are spread over SMs, and
what masked columns waste where passes do not divide K. The constants are fitted as in ``mid_linear``'s rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from headway.core.ints import cdiv, next_power_of_2, round_up
from headway.kernels.capability import LEAST_KB, SHARED_KB
from headway.kernels.linear_forms.card import Card
from headway.kernels.skinny_linear.tile import Kind, Tile, row_bucket

LATENCY = 0.8
"""Microseconds from a load to its data while memory is busy."""
START = 1.6
"""Microseconds from the kernel ahead to the next one, apart from its weights."""
HIDDEN = 1.5
"""Microseconds of loads, at most, that are over when the kernel ahead has ended."""
BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of rows that kernels are compiled for."""
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32
"""What an SM has room for."""
ROW = 0.35
"""Microseconds that a row costs without matrix units, where its products are sums of its own."""
NORM_RATE = 40e3
"""Bytes a microsecond of activations that an SM normalises anew for each program."""
HELD_WHOLE = 2048
"""Inputs up to which a program's weights fit into registers whole."""
WAVES = 3
"""Programs for each SM up to which weights held whole win; with more, each ends too early to be worth its start."""
MANY_OUTPUTS = 16384
"""Outputs from which on the tiles of products with a norm were as fast as any (gate and up of models of 2B and more)."""
HEAD_OUTPUTS = 32768
"""Outputs that output layers alone have."""


def predicted(kind: Kind, tile: Tile, rows: int, outputs: int, inputs: int, card: Card) -> float:
    """Microseconds of [rows, K] x [N, K]^T inside a chain of kernels that start early; N counts gate and up rows."""
    pair = pair_of(kind)
    wide = tile.block_n * pair
    programs, threads = cdiv(outputs, wide), 32 * tile.num_warps
    padded = round_up(inputs, tile.step)
    held = min(tile.held * tile.step, padded)
    ahead = max(held, min(padded, tile.num_stages * tile.step if tile.num_stages > 1 else tile.step))
    in_registers = held * (wide + (row_bucket(rows) if tile.splits else 1)) // (2 * threads)
    sums = wide * tile.block_k // threads if tile.splits == 0 else row_bucket(rows) * wide // 32
    registers = min(255, 40 + in_registers + sums)
    resident = max(1, min(REGISTERS // (registers * threads), THREADS // threads, PROGRAMS))
    at_once = min(resident, cdiv(programs, card.sms))
    flight = at_once * wide * ahead * 2
    rate = min(card.bandwidth, card.sms * flight / LATENCY)
    body = 2 * outputs * padded / rate
    turns = programs / (card.sms * resident)
    body *= cdiv(programs, card.sms * resident) / turns if turns > 1 else 1.0
    spread = cdiv(programs, card.sms) * card.sms / programs
    body *= 1 + 0.15 * min(spread - 1, 1)
    hidden = min(card.sms * at_once * wide * held * 2 / card.bandwidth, HIDDEN)
    spilled = 1.5 * max(0, in_registers + sums - 190) / 64
    activations = rows * inputs * 2 * cdiv(programs, card.sms) / NORM_RATE * (1.0 if kind.startswith("norm") else 0.3)
    return (
        START
        + max(body - hidden, activations)
        + 0.15 * activations
        + spilled
        + (ROW * rows if not tile.splits else 0.0)
    )


def expected(kind: Kind, tile: Tile, rows: int, outputs: int, inputs: int, card: Card) -> float:
    """``predicted`` where rows never make a product faster: a tile pads fewer rows to more, at no less than these take.

    What ``predicted`` says of programs that share an SM is a guess, and may fall when rows take more registers.
    """
    more = (each for each in BUCKETS if each >= row_bucket(rows))
    return min(predicted(kind, tile, each, outputs, inputs, card) for each in more)


@lru_cache(maxsize=4096)
def ranked(kind: Kind, rows: int, outputs: int, inputs: int, card: Card) -> tuple[tuple[float, Tile], ...]:
    """Every tile worth a look, with its predicted microseconds, the best first."""
    tiles = dict.fromkeys(candidates(kind, rows, inputs))
    return tuple(
        sorted(
            ((predicted(kind, tile, rows, outputs, inputs, card), tile) for tile in tiles),
            key=lambda x: (x[0], repr(x[1])),
        )
    )


def candidates(kind: Kind, rows: int, inputs: int) -> Iterator[Tile]:
    """Tiles whose weights fit into registers, whole or in part."""
    pair = pair_of(kind)
    if rows <= 2:
        for wide, block_k, warps in product((2, 4, 8), (256, 512, 1024, 2048), (1, 2, 4, 8, 16)):
            passes, threads = cdiv(inputs, block_k), 32 * warps
            if wide < pair or not 8 * threads <= wide * block_k <= 64 * threads:
                continue
            if passes * block_k > 1.13 * inputs and block_k > 256:
                continue
            for held in sorted({passes, min(passes, 4), min(passes, 8)}):
                each = wide * held * block_k // threads
                if 24 <= each <= 160:
                    yield Tile(wide // pair, block_k, 0, warps, 1 if held == passes else 3, held)
    if rows > 1:
        for wide, block_k, splits, warps in product((8, 16, 32), (64, 128, 256), (2, 4, 8), (2, 4, 8)):
            step = splits * block_k
            passes, threads = cdiv(inputs, step), 32 * warps
            if warps < splits or not 128 <= step <= min(inputs, 1024) or passes * step > 1.13 * inputs:
                continue
            for held, stages in {(0, 4), (0, 3), (1, 3), (2, 3), (passes, 1)}:
                weights, activations = wide * held * step // threads, row_bucket(rows) * held * step // threads
                whole = held >= passes
                if held > passes or (whole and stages > 1) or weights > 128 or activations > 96:
                    continue
                if (held and weights < 16) or (not held and (step > 512 or warps > 4)):
                    continue
                yield Tile(wide // pair, block_k, splits, warps, stages, held)


@lru_cache(maxsize=4096)
def best_tile(kind: Kind, bucket: int, outputs: int, inputs: int, card: Card) -> Tile:
    """The tile for a bucket of rows: what won, or came within a few percent, over measured shapes.

    One row is multiplied without tensor cores, by tiles as they won there; which passes waste least of K, and how programs are
    spread, is the prediction's to say. Where even the best takes longer than more rows do, one row takes their tile.
    """
    bare = not kind.startswith("norm")
    usual = (_of_more_bare_rows if bare else _of_more_rows)(kind, outputs, inputs, card)
    if bucket > 1:
        return usual
    tiles = candidates(kind, 1, inputs) if bare and inputs <= HELD_WHOLE else _of_one_row(kind, inputs)
    own = min(tiles, key=lambda tile: (predicted(kind, tile, 1, outputs, inputs, card), repr(tile)), default=usual)
    alone, padded = predicted(kind, own, 1, outputs, inputs, card), expected(kind, usual, 2, outputs, inputs, card)
    return (
        own if alone <= padded + ROW or kind == "gate_up" else usual
    )  # of gate_up it was the faster one in all six models


def _of_one_row(kind: Kind, inputs: int) -> Iterator[Tile]:
    pair, whole = pair_of(kind), max(16, next_power_of_2(inputs))
    for wide, block_k, each in product((4, 8), dict.fromkeys(min(size, whole) for size in (1024, 512, 256)), (32, 16)):
        warps = max(1, wide * block_k // (32 * each))
        passes = cdiv(inputs, block_k)
        if warps <= 8:
            yield Tile(wide // pair, block_k, 0, warps, 1 if passes <= 4 else 3, min(passes, 4))


def pair_of(kind: Kind) -> int:
    """Weight rows of an output: of gate and up there are two."""
    return 2 if kind in ("norm_gate_up", "gate_up") else 1


def _of_more_bare_rows(kind: Kind, outputs: int, inputs: int, card: Card) -> Tile:
    """Without a norm. Fitted by hand to the times of a dozen tiles for each of 24 products of six models, at 8 rows on an
    H100 (``bench/ops/few_tiles.py``); it has been timed on no other shape, card or number of rows."""
    pair = pair_of(kind)
    roomy = SHARED_KB.get(card.capability, LEAST_KB) > LEAST_KB
    if inputs <= HELD_WHOLE:
        whole = _of_more_rows(kind, outputs, inputs, card)
        if outputs >= HEAD_OUTPUTS or cdiv(outputs, whole.block_n * pair) <= WAVES * card.sms:
            return whole
        return Tile(16, 64, 2, 4, 3 if roomy else 2, 2) if pair == 2 else Tile(16, 128, 4, 4, 3 if roomy else 2, 1)
    if outputs >= MANY_OUTPUTS:
        return _of_more_rows(kind, outputs, inputs, card)
    wide = min((16, 8), key=lambda each: cdiv(cdiv(outputs, each), card.sms) * each)  # least work on the busiest SM
    # A program that has an SM to itself keeps twice the inputs on their way.
    splits = 8 if roomy and cdiv(outputs, wide) <= card.sms else 4
    return Tile(wide // pair, 128, splits, 8, 3 if roomy else 2, 2)


def _of_more_rows(kind: Kind, outputs: int, inputs: int, card: Card) -> Tile:
    pair = pair_of(kind)
    if outputs >= HEAD_OUTPUTS and pair == 1:
        return Tile(32, 64, 2, 2, 4, 0)  # 36 KB
    if inputs <= HELD_WHOLE:  # the whole tile in registers
        return Tile((16 if inputs <= 1024 else 8) // pair, 128, 4, 4, 1, cdiv(inputs, 512))
    roomy = SHARED_KB.get(card.capability, LEAST_KB) > LEAST_KB  # three passes in flight take 96 KB for 16 rows
    return Tile(16 // pair, 128, 4, 4, 3 if roomy else 2, 1)
