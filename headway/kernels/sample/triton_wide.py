"""Wide rows of ``sample``: filtered rows that keep too many tokens for one program (a large top_p on a flat row).

All programs (row, split) of a launch share the wide rows; rows that are not wide end at once. The launches:

1. ``levels`` times ``narrow_kernel``: sums the weights of the tokens above a few pivots, which narrows the bracket that the
   threshold is in. A weight is exp(x - top) for top_p, and 1 for top_k.
2. ``bound_kernel``: collects what is left in the bracket; the row's last program finds the threshold in it.
3. ``wide_race_kernel``: the race among all tokens that stay; the row's last program writes the winner.

A row with a wide top_k and a top_p goes through 1 and 2 twice. Sums over programs are of integers, so that neither their
order nor the number of splits can change a token.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.sample.triton_race import LOG2_E, NO_TOKEN, best_of, race_score
from headway.kernels.sample.triton_select import BELOW_ALL, mass_key, row_key
from headway.kernels.triton_candidates import penalised_row, scaled
from headway.kernels.triton_math import float_of_key, order_key, weight_below

NOT_WIDE, BY_COUNT, BY_MASS, TO_RACE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Stages of a row: nothing to do here, searching the bound of top_k, of top_p, the bound is known."""

ONE = tl.constexpr(float(1 << 40))
"""Weight 1 as a sum's integer: a million weights fit 64 bits, and 2^-40 of the largest weight is below f32's rounding."""

# Words of a row's record (int64), then LEVELS times: low, high, above, target, the pivots, their sums.
STAGE, TOP, FLOOR, BOUND, FOUND, COLLECTED, RACED, BEST = (tl.constexpr(index) for index in range(8))
HEAD = tl.constexpr(8)
NOTHING = tl.constexpr(-(2**63))


def record_words(levels: int, pivots: int) -> int:
    """int64 words of a row's record."""
    return triton.next_power_of_2(8 + levels * (4 + 2 * pivots))


@triton.jit
def open_row(at, stage, top, floor, low, WORDS: tl.constexpr):
    """Write a fresh record: the bound is >= ``low``, and not below ``floor`` (keys); ``TO_RACE``: it is the floor."""
    index = tl.arange(0, WORDS)
    words = tl.where(index == STAGE, stage, 0).to(tl.int64)
    words = tl.where(index == TOP, top.to(tl.int64), words)
    words = tl.where((index == FLOOR) | (index == BOUND), floor.to(tl.int64), words)
    words = tl.where(index == BEST, NOTHING, words)
    words = tl.where(index == HEAD, low.to(tl.int64), words)
    tl.store(at + index, tl.where(index == HEAD + 1, top.to(tl.int64) + 1, words))


@triton.jit
def bracket(at, stage, k, p, level, PIVOTS: tl.constexpr):
    """(low, high, above, target) after the passes before ``level``: low <= the bound < high, keys >= high weigh ``above``."""
    record = at + HEAD + (level - 1) * (4 + 2 * PIVOTS)
    low, high = tl.load(record), tl.load(record + 1)
    above, target = tl.load(record + 2), tl.load(record + 3)
    index = tl.arange(0, PIVOTS)
    pivots = tl.load(record + 4 + index)
    sums = tl.load(record + 4 + PIVOTS + index)
    if level == 1:  # the first pivot is the floor: its sum is that of all that the filters before this one kept
        whole = tl.max(sums, 0)
        target = (p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
        if stage == BY_COUNT:
            target = tl.minimum(k.to(tl.int64) << 40, whole)
    enough = sums >= target
    low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
    high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
    above = tl.maximum(above, tl.max(tl.where(enough, above, sums), 0))
    return low, high, above, target


@triton.jit
def _even_pivots(low, high, top, beyond, PIVOTS: tl.constexpr):
    """Keys between low and high, at even distances of value; at most ``beyond`` lower than high is below the top."""
    index = tl.arange(0, PIVOTS)
    highest = float_of_key(high.to(tl.int32))
    lowest = tl.maximum(float_of_key(low.to(tl.int32)), 2.0 * highest - top - beyond)
    step = (highest - lowest) / (PIVOTS + 1)
    return order_key(lowest + step * (index + 1).to(tl.float32)).to(tl.int64)


@triton.jit
def _first_pivots(line, vocab, heat, top, floor, low, high, PIVOTS: tl.constexpr):
    """The floor, then the values of some tokens: as many tokens are likely to be between any two of them."""
    index = tl.arange(0, PIVOTS)
    token = index.to(tl.int64) * vocab // PIVOTS
    key = order_key(scaled(line, token, token < vocab, heat)).to(tl.int64)
    key = tl.where(key > low, key, _even_pivots(low, high, top, 16.0, PIVOTS))
    return tl.where(index == 0, floor, tl.minimum(tl.maximum(key, low + 1), high - 1))


@triton.jit
def _sums_above(
    line, vocab, heat, top, pivots, counted, PIVOTS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Weight of this program's tokens >= each of the pivots, int64 [PIVOTS]."""
    total = tl.zeros([PIVOTS], tl.int64)
    bounds = pivots.to(tl.int32)[None, :]
    for segment in range(tl.program_id(1), tl.cdiv(vocab, SEGMENT), tl.num_programs(1)):
        sums = tl.zeros([BLOCK, PIVOTS], tl.float32)
        for offset in range(0, SEGMENT, BLOCK):
            token = segment * SEGMENT + offset + tl.arange(0, BLOCK)
            mask = token < vocab
            x = scaled(line, token, mask, heat)
            weight = tl.where(mask, tl.where(counted, 1.0, weight_below(x, top)), 0.0)
            sums += tl.where(order_key(x)[:, None] >= bounds, weight[:, None], 0.0)
        total += (tl.sum(sums, 0) * ONE).to(tl.int64)
    return total


@triton.jit(do_not_specialize=["level"])
def narrow_kernel(
    logits, slots, temperature, top_k, top_p, counts, count_on, repetition, frequency, presence, wide, row_stride, vocab, level,
    PIVOTS: tl.constexpr, WORDS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = wide + row * WORDS
    stage = tl.load(at + STAGE)
    if (stage == BY_COUNT) | (stage == BY_MASS):
        slot = tl.load(slots + row).to(tl.int64)
        heat = tl.load(temperature + slot)
        line = penalised_row(logits + row * row_stride, slot, vocab, counts, count_on, repetition, frequency, presence)
        top = float_of_key(tl.load(at + TOP).to(tl.int32))
        record = at + HEAD + level * (4 + 2 * PIVOTS)
        index = tl.arange(0, PIVOTS)
        low, high = tl.load(at + HEAD), tl.load(at + HEAD + 1)  # of level 0
        if level == 0:
            pivots = _first_pivots(line, vocab, heat, top, tl.load(at + FLOOR), low, high, PIVOTS)
        else:
            low, high, above, target = bracket(at, stage, tl.load(top_k + slot), tl.load(top_p + slot), level, PIVOTS)
            pivots = _even_pivots(low, high, top, 1.0, PIVOTS)
            pivots = tl.minimum(tl.maximum(pivots, low + 1), high - 1)
            if tl.program_id(1) == 0:
                tl.store(record, low)
                tl.store(record + 1, high)
                tl.store(record + 2, above)
                tl.store(record + 3, target)
        if tl.program_id(1) == 0:
            tl.store(record + 4 + index, pivots)
        if high - low > 1:
            sums = _sums_above(line, vocab, heat, top, pivots, stage == BY_COUNT, PIVOTS, SEGMENT, BLOCK)
            tl.atomic_add(record + 4 + PIVOTS + index, sums)


@triton.jit
def _collect_keys(line, vocab, heat, low, high, at, keys, SEGMENT: tl.constexpr, LARGE: tl.constexpr):
    """Append the keys of this program's tokens in [low, high), in any order."""
    for segment in range(tl.program_id(1), tl.cdiv(vocab, SEGMENT), tl.num_programs(1)):
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        key = order_key(scaled(line, token, token < vocab, heat))
        kept = (token < vocab) & (key >= low) & (key < high)
        count = tl.sum(kept.to(tl.int32), 0)
        if count > 0:
            place = tl.atomic_add(at + FOUND, count.to(tl.int64)) + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(keys + place, key, mask=kept & (place < LARGE))


@triton.jit
def _bound_among(keys, size, low, high, top, counted, target, CANDIDATES: tl.constexpr):
    """Largest of the collected keys which, with all larger ones, weighs ``target``."""
    index = tl.arange(0, CANDIDATES)
    # Past the first-level cache: other processors wrote them.
    key = tl.load(keys + index, mask=index < size, other=BELOW_ALL, cache_modifier=".cg")
    weight = tl.where(counted, 1.0, weight_below(float_of_key(key), top))
    weight = (tl.where(index < size, weight, 0.0) * ONE).to(tl.int64)
    return mass_key(key, weight, low.to(tl.int32), (high - 1).to(tl.int32), target)


@triton.jit
def bound_kernel(
    logits, slots, temperature, top_k, top_p, counts, count_on, repetition, frequency, presence, wide, keys, row_stride,
    vocab,
    LEVELS: tl.constexpr, PIVOTS: tl.constexpr, WORDS: tl.constexpr, SEGMENT: tl.constexpr, SMALL: tl.constexpr,
    LARGE: tl.constexpr, ROW_PIVOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = wide + row * WORDS
    stage = tl.load(at + STAGE)
    if (stage == BY_COUNT) | (stage == BY_MASS):
        slot = tl.load(slots + row).to(tl.int64)
        heat, k, p = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
        line = penalised_row(logits + row * row_stride, slot, vocab, counts, count_on, repetition, frequency, presence)
        counted = stage == BY_COUNT
        low, high, above, target = bracket(at, stage, k, p, LEVELS, PIVOTS)
        if high - low > 1:
            _collect_keys(line, vocab, heat, low, high, at, keys + row * LARGE, SEGMENT, LARGE)
        tl.debug_barrier()  # all threads' keys are written before the program says that it is done
        if tl.atomic_add(at + COLLECTED, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            top = float_of_key(tl.load(at + TOP).to(tl.int32))
            size = tl.atomic_add(at + FOUND, 0)
            bound = low.to(tl.int32)
            if high - low > 1:
                if size <= SMALL:
                    bound = _bound_among(keys + row * LARGE, size, low, high, top, counted, target - above, SMALL)
                elif size <= LARGE:
                    bound = _bound_among(keys + row * LARGE, size, low, high, top, counted, target - above, LARGE)
                elif counted:
                    aim = (target >> 40).to(tl.float32)
                    bound = row_key(line, vocab, heat, top, bound, aim, False, ROW_PIVOTS, 1024)
                else:
                    aim = target.to(tl.float32) / ONE
                    bound = row_key(line, vocab, heat, top, bound, aim, True, ROW_PIVOTS, 1024)
            after = tl.where(counted & (p < 1.0), BY_MASS, TO_RACE)
            open_row(at, after, order_key(top), bound, bound, WORDS)


@triton.jit
def wide_race_kernel(
    logits, slots, temperature, seeds, num_tokens, counts, count_on, repetition, frequency, presence, wide, out,
    row_stride, vocab,
    WORDS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = wide + row * WORDS
    if tl.load(at + STAGE) == TO_RACE:
        slot = tl.load(slots + row).to(tl.int64)
        heat, position = tl.load(temperature + slot), tl.load(num_tokens + slot)
        low, high = tl.load(seeds + 2 * slot), tl.load(seeds + 2 * slot + 1)
        bound = tl.load(at + BOUND)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        winner = tl.full([BLOCK], NO_TOKEN, tl.int32)
        line = penalised_row(logits + row * row_stride, slot, vocab, counts, count_on, repetition, frequency, presence)
        for segment in range(tl.program_id(1), tl.cdiv(vocab, SEGMENT), tl.num_programs(1)):
            for offset in range(0, SEGMENT, BLOCK):
                token = segment * SEGMENT + offset + tl.arange(0, BLOCK)
                x = scaled(line, token, token < vocab, heat)
                score = race_score(x, LOG2_E, low, high, position, token)
                better = (order_key(x) >= bound) & (token < vocab) & (score > best)
                best = tl.where(better, score, best)
                winner = tl.where(better, token, winner)
        score, token = best_of(best, winner)
        # One number that is larger for a larger score, and of equal scores for the lower token.
        tl.atomic_max(at + BEST, (order_key(score).to(tl.int64) << 32) | (token.to(tl.int64) ^ NO_TOKEN))
        if tl.atomic_add(at + RACED, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            final = tl.atomic_max(at + BEST, NOTHING)  # reads what all have written
            tl.store(out + row, ((final & NO_TOKEN) ^ NO_TOKEN).to(tl.int32))
