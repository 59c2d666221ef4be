"""Second kernel of ``sample``: one program per row.

Greedy and plain random rows: the best of the blocks' winners. Filtered rows:

1. From the parts' maxima and masses, a floor that the threshold cannot be below but is near (``safe_floor``).
2. Collect the candidates, the tokens >= floor, from the few parts whose maximum reaches it.
3. The thresholds among the candidates, exactly, and the race among those that stay.

Rows with too many candidates are left to ``triton_wide``, which many programs share, if their parameters suggest it (flat
distributions with a large top_p, or a huge top_k) and it is launched with as many ``searches`` as they need. The others
(thousands of equal logits with a small top_k) search and race over all their logits here: slower, same meaning.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.sample.triton_race import LOG2_E, NO_TOKEN, best_of, is_filtered, race_score
from headway.kernels.sample.triton_select import (
    ABOVE_ALL,
    BELOW_ALL,
    kth_key,
    mass_key,
    row_key,
    row_mass,
    safe_floor,
)
from headway.kernels.sample.triton_wide import BY_COUNT, BY_MASS, NOT_WIDE, STAGE, TO_RACE, open_row
from headway.kernels.triton_candidates import collect, penalised_row, scaled
from headway.kernels.triton_early import start_next, wait_for_inputs
from headway.kernels.triton_math import float_of_key, order_key, weight_below


@triton.jit
def _draw_candidates(
    values, tokens, size, top, total, floor, k, has_k, p, whole, low, high, position, CANDIDATES: tl.constexpr
):
    """The token drawn among ``size`` candidates. ``floor``: of min_p. ``whole``: their mass is not all, ``total`` is."""
    index = tl.arange(0, CANDIDATES)
    mask = index < size
    x = tl.load(values + index, mask=mask, other=float("-inf"))
    token = tl.load(tokens + index, mask=mask, other=0)
    key = tl.where(mask, order_key(x), BELOW_ALL)
    bound = order_key(floor)
    if has_k:
        bound = tl.maximum(bound, kth_key(key, bound, order_key(top), k))
    if p < 1.0:
        weight = tl.where(mask, weight_below(x, top), 0.0)
        mass = total
        if not whole:
            mass = tl.sum(tl.where(key >= bound, weight, 0.0), 0)
        bound = tl.maximum(bound, mass_key(key, weight, bound, order_key(top), p * mass))
    score = race_score(x, LOG2_E, low, high, position, token)
    _, winner = best_of(tl.where(mask & (key >= bound), score, float("-inf")), tl.where(mask, token, NO_TOKEN))
    return winner


@triton.jit
def _draw_row(
    line, vocab, heat, top, floor, k, has_k, p, low, high, position, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The token drawn from all logits of a row."""
    bound = order_key(floor)
    if has_k:
        bound = tl.maximum(bound, row_key(line, vocab, heat, top, bound, k.to(tl.float32), False, PIVOTS, BLOCK))
    if p < 1.0:
        target = p * row_mass(line, vocab, heat, top, float_of_key(bound), BLOCK)
        bound = tl.maximum(bound, row_key(line, vocab, heat, top, bound, target, True, PIVOTS, BLOCK))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    winner = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = scaled(line, token, token < vocab, heat)
        score = race_score(x, LOG2_E, low, high, position, token)
        better = (order_key(x) >= bound) & (token < vocab) & (score > best)
        best = tl.where(better, score, best)
        winner = tl.where(better, token, winner)
    _, token = best_of(best, winner)
    return token


@triton.jit
def _filtered_token(
    line, tops_at, sums_at, hot, values, tokens, at, heat, k, p, min_p, low, high, position, vocab, parts, searches,
    PARTS: tl.constexpr, PART: tl.constexpr, GATHER: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    PIVOTS: tl.constexpr, WIDE_K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PARTS)
    tops = tl.load(tops_at + part, mask=part < parts, other=float("-inf"))
    sums = tl.load(sums_at + part, mask=part < parts, other=0.0)
    top = tl.max(tops, 0)
    winner = -1
    if top > float("-inf"):
        total = tl.sum(sums * weight_below(tops, top), 0)
        has_k = (k > 0) & (k < vocab)
        floor = tl.where(min_p > 0.0, top + tl.log(min_p), float("-inf"))
        whole = (not has_k) & (min_p <= 0.0)
        start = floor
        if has_k | whole:  # top_p takes its mass of all that top_k and min_p keep: these must be among the candidates
            most = tl.where(has_k, k, ABOVE_ALL)
            start = tl.maximum(floor, safe_floor(tops, sums, top, total, most, tl.where(whole, p, 2.0), PART))
        size = collect(line, tops, start, heat, vocab, parts, hot, values, tokens, PARTS, PART, GATHER, LARGE)
        if size <= SMALL:
            winner = _draw_candidates(
                values, tokens, size, top, total, floor, k, has_k, p, whole, low, high, position, SMALL
            )
        elif size <= LARGE:
            winner = _draw_candidates(
                values, tokens, size, top, total, floor, k, has_k, p, whole, low, high, position, LARGE
            )
        elif (searches > 0) & ((k <= 0) | (k > WIDE_K)) & ((searches == 2) | (k <= 0) | (p >= 1.0)):
            stage = tl.where(has_k, BY_COUNT, tl.where(p < 1.0, BY_MASS, TO_RACE))
            open_row(at, stage, order_key(top), order_key(floor), order_key(start), WORDS)
        else:
            winner = _draw_row(line, vocab, heat, top, floor, k, has_k, p, low, high, position, PIVOTS, 512)
    return winner


@triton.jit
def _best_of_blocks(scores, tokens, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < chunks
    score = tl.load(scores + chunk, mask=mask, other=float("-inf"))
    best, winner = best_of(score, tl.load(tokens + chunk, mask=mask, other=NO_TOKEN))
    return tl.where(best > float("-inf"), winner, -1)


@triton.jit(do_not_specialize=["searches"])
def finish_kernel(
    logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, counts, count_on, repetition, frequency,
    presence, best_score, best_token, part_top, part_sum, hot, values, tokens, wide, out, row_stride, vocab, num_slots,
    chunks, parts, searches,
    FILTER: tl.constexpr, GREEDY_EPS: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    GATHER: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, PIVOTS: tl.constexpr, WIDE_K: tl.constexpr,
    WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    on = (slot >= 0) & (slot < num_slots)
    filtered = False
    if FILTER:
        filtered = is_filtered(on, slot, temperature, top_k, top_p, min_p, vocab, GREEDY_EPS)
        at = tl.where(on, slot, 0)
        heat, k, p, low = tl.load(temperature + at), tl.load(top_k + at), tl.load(top_p + at), tl.load(min_p + at)
        seed, seed_high, position = tl.load(seeds + 2 * at), tl.load(seeds + 2 * at + 1), tl.load(num_tokens + at)
        line = penalised_row(logits + row * row_stride, at, vocab, counts, count_on, repetition, frequency, presence)
    wait_for_inputs(EARLY)
    winner = 0
    if FILTER:
        if searches > 0:
            tl.store(wide + row * WORDS + STAGE, NOT_WIDE)
            tl.debug_barrier()  # another thread may write the stage again
        if filtered:
            winner = _filtered_token(
                line, part_top + row * parts, part_sum + row * parts, hot + row * parts, values + row * LARGE,
                tokens + row * LARGE, wide + row * WORDS, heat, k, p, low, seed, seed_high, position, vocab, parts, searches,
                PARTS, PART, GATHER, SMALL, LARGE, PIVOTS, WIDE_K, WORDS,
            )  # fmt: skip
        elif on:
            winner = _best_of_blocks(best_score + row * chunks, best_token + row * chunks, chunks, CHUNKS)
    elif on:
        winner = _best_of_blocks(best_score + row * chunks, best_token + row * chunks, chunks, CHUNKS)
    tl.store(out + row, winner)
