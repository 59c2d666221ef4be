"""First kernel of ``sample``: reads every logit once.

Programs (row, block). Greedy and plain random rows race their tokens and keep the block's winner. Filtered rows only note
the maximum and the mass of each part of the block: the second kernel (``triton_finish``) then knows where to look.
Penalties are applied to what is read, here and wherever logits are read again: no copy of the logits is made for them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.triton_candidates import penalised, penalised_row
from headway.kernels.triton_early import start_next, wait_for_inputs

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _mix(x):
    """lowbias32; see ``rng``, which this repeats bit for bit."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def token_bits(low, high, position, token):
    """32 random bits (uint32) of (seed, position, token), all of them int32."""
    low = low.to(tl.uint32, bitcast=True)
    high = high.to(tl.uint32, bitcast=True)
    position = position.to(tl.uint32, bitcast=True)
    first = _mix(_mix(_mix(low + 0x9E3779B9) ^ high) + position)
    second = _mix(_mix(_mix(position + 0x85EBCA6B) ^ high) + low)
    x = (token.to(tl.uint32, bitcast=True) * 0x9E3779B1) ^ first
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    return _mix(x + second)


@triton.jit
def _log2(x):
    """log2 of a normal f32: the hardware's, relative error 2^-22 (absolute between 1/2 and 2).

    ``tl.log2`` handles subnormals and rounds better in 25 instructions, which is half the time of a draw.
    """
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_exponential(bits):
    """log2(E / ln 2), E = -log(1 - u). A constant more than log2(E) changes no race and saves a product.

    Below 1/16 the series of -log(1 - u): 1 - u would lose the low bits of u. Its first left-out term is u^6 / 6.
    """
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    series = 0.28853901 + u * 0.24044918  # log2(e) / 5, log2(e) / 6
    series = 0.36067376 + u * series
    series = 0.48089835 + u * series
    series = 0.72134752 + u * series
    series = u * (1.44269504 + u * series)
    return _log2(tl.where(u < 0.0625, series, -_log2(1.0 - u)))


@triton.jit
def race_score(x, rate, low, high, position, token):
    """What the race compares: (x * rate) - log2 of the token's exponential; ``rate`` is log2(e) / temperature of x."""
    return tl.fma(x, tl.zeros_like(x) + rate, -log2_exponential(token_bits(low, high, position, token)))


@triton.jit
def best_of(score, token):
    """(largest score, lowest token that has it)."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, NO_TOKEN), 0)


@triton.jit
def is_filtered(on, slot, temperature, top_k, top_p, min_p, vocab, GREEDY_EPS: tl.constexpr):
    """Whether the row draws at random with top_k, top_p or min_p."""
    heat = tl.load(temperature + slot, mask=on, other=0.0)
    k = tl.load(top_k + slot, mask=on, other=0)
    p = tl.load(top_p + slot, mask=on, other=1.0)
    low = tl.load(min_p + slot, mask=on, other=0.0)
    return on & (heat >= GREEDY_EPS) & (((k > 0) & (k < vocab)) | (p < 1.0) | (low > 0.0))


@triton.jit
def _note_parts(x, mask, heat, tops, sums, PARTS: tl.constexpr, PART: tl.constexpr):
    """Maximum of x / heat, and sum of exp(x / heat - maximum), of each part of the block."""
    x = tl.reshape(x, [PARTS, PART])
    inside = tl.reshape(mask.to(tl.int32), [PARTS, PART]) != 0
    top = tl.max(x, 1)
    rate = LOG2_E / heat
    weight = tl.where(x == top[:, None], 1.0, tl.exp2((x - top[:, None]) * rate))  # also right for infinities
    index = tl.arange(0, PARTS)
    tl.store(tops + index, tl.math.div_rn(top, tl.zeros_like(top) + heat))
    tl.store(sums + index, tl.sum(tl.where(inside, weight, 0.0), 1))


@triton.jit
def race_kernel(
    logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, counts, count_on, repetition, frequency,
    presence, best_score, best_token, part_top, part_sum, row_stride, vocab, num_slots,
    RANDOM: tl.constexpr, FILTER: tl.constexpr, GREEDY_EPS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    on = (slot >= 0) & (slot < num_slots)
    wait_for_inputs(EARLY)
    if on:
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = token < vocab
        line = logits + row * row_stride
        # Before all loads that something waits for at once: it takes longest.
        x = tl.load(line + token, mask=mask, other=float("-inf"))
        filtered = False
        heat = 0.0
        if RANDOM:
            heat, position = tl.load(temperature + slot), tl.load(num_tokens + slot)
            low, high = tl.load(seeds + 2 * slot), tl.load(seeds + 2 * slot + 1)
        if FILTER:
            filtered = is_filtered(on, slot, temperature, top_k, top_p, min_p, vocab, GREEDY_EPS)
            with_penalties = penalised_row(line, slot, vocab, counts, count_on, repetition, frequency, presence)
            x = penalised(x, with_penalties, token, mask)
        else:
            x = penalised(x, (line,), token, mask)
        place = row * tl.num_programs(1) + chunk
        if filtered:
            at = place * (BLOCK // PART)
            _note_parts(x, mask, heat, part_top + at, part_sum + at, BLOCK // PART, PART)
        else:
            if RANDOM:
                if heat >= GREEDY_EPS:
                    x = race_score(x, LOG2_E / heat, low, high, position, token)
            score, winner = best_of(x, token)
            tl.store(best_score + place, score)
            tl.store(best_token + place, winner)
