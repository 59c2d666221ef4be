"""Exact thresholds without a sort: bisections over the order-preserving integer keys of floats (device functions).

All take a weight that can only grow when the threshold falls, and look for the largest threshold that reaches a target.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.triton_candidates import scaled
from headway.kernels.triton_math import float_of_key, order_key, weight_below

BELOW_ALL = tl.constexpr(-2147483648)
ABOVE_ALL = tl.constexpr(2147483647)


@triton.jit
def safe_floor(tops, sums, top, total, k, p, PART: tl.constexpr):
    """A value that the threshold is surely not below, but close to; or -inf. Either ``k`` or ``p`` is on.

    k of the parts' maxima being >= t, so are k tokens. And a part's tokens >= t weigh at least as much as its maximum, and
    at least its sum less PART weights of t. ``k``: the largest int if off; ``p``: 2 if off.
    """
    weight = weight_below(tops, top)
    mass = sums * weight
    low = order_key(float("-inf") + tl.zeros_like(top)).to(tl.int64)
    high = order_key(top).to(tl.int64) + 1
    while high - low > 65536:  # a 1/128 of the value: close enough
        middle = low + (high - low) // 2
        t = float_of_key(middle.to(tl.int32))
        reached = tops >= t
        rest = mass - PART * weight_below(t, top)
        count = tl.sum(reached.to(tl.int32), 0)
        least = tl.sum(tl.maximum(tl.where(reached, weight, 0.0), rest), 0)
        enough = (count >= k) | (least >= p * total * 1.0001)  # the margin covers the rounding of the sums
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return float_of_key(low.to(tl.int32))


@triton.jit
def kth_key(key, floor, top, k):
    """Key of the k-th largest of ``key`` (int32), which is not below ``floor``. The smallest key >= floor if there is none."""
    low = floor.to(tl.int64)
    high = top.to(tl.int64) + 1
    at_low = tl.sum((key >= floor).to(tl.int32), 0)
    at_high = 0
    while (high - low > 1) & (at_low - at_high > 1):
        middle = low + (high - low) // 2
        count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = count >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        at_low = tl.where(enough, count, at_low)
        at_high = tl.where(enough, at_high, count)
    return tl.min(tl.where(key >= low.to(tl.int32), key, ABOVE_ALL), 0)


@triton.jit
def mass_key(key, weight, floor, top, target):
    """Largest of ``key`` whose and all larger keys' weights reach ``target``; the smallest key >= floor if none does."""
    low = floor.to(tl.int64)
    high = top.to(tl.int64) + 1
    at_low = tl.sum((key >= floor).to(tl.int32), 0)
    at_high = 0
    while (high - low > 1) & (at_low - at_high > 1):
        middle = low + (high - low) // 2
        above = key >= middle.to(tl.int32)
        count = tl.sum(above.to(tl.int32), 0)
        enough = tl.sum(tl.where(above, weight, tl.zeros_like(weight)), 0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        at_low = tl.where(enough, count, at_low)
        at_high = tl.where(enough, at_high, count)
    return tl.min(tl.where(key >= low.to(tl.int32), key, ABOVE_ALL), 0)


@triton.jit
def _pivots(low, high, top, by_value, PIVOTS: tl.constexpr):
    """int64 keys strictly between low and high: at even distances of value, or of key."""
    index = tl.arange(0, PIVOTS) + 1
    lowest = tl.maximum(float_of_key(low.to(tl.int32)), top - 32.0)
    highest = float_of_key(high.to(tl.int32))
    even = lowest + (highest - lowest) * (index.to(tl.float32) / (PIVOTS + 1))
    by_key = low + (high - low) * index // (PIVOTS + 1)
    pivots = tl.where(by_value, order_key(even).to(tl.int64), by_key)
    return tl.minimum(tl.maximum(pivots, low + 1), high - 1)


@triton.jit
def row_key(line, vocab, heat, top, floor, target, MASS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """As ``kth_key`` or ``mass_key`` for a whole row of logits, several pivots a pass over it."""
    low = floor.to(tl.int64)
    high = order_key(top).to(tl.int64) + 1
    at_low = vocab
    at_high = 0
    passes = 0
    while (high - low > 1) & (at_low - at_high > 1):
        pivots = _pivots(low, high, top, passes < 6, PIVOTS)
        counts = tl.zeros([BLOCK, PIVOTS], tl.int32)
        masses = tl.zeros([BLOCK, PIVOTS], tl.float32)
        for begin in range(0, vocab, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            x = scaled(line, token, token < vocab, heat)
            above = (order_key(x)[:, None] >= pivots.to(tl.int32)[None, :]) & (token < vocab)[:, None]
            counts += above.to(tl.int32)
            if MASS:
                masses += tl.where(above, weight_below(x, top)[:, None], 0.0)
        count = tl.sum(counts, 0)
        enough = count.to(tl.float32) >= target
        if MASS:
            enough = tl.sum(masses, 0) >= target
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
        at_low = tl.minimum(at_low, tl.min(tl.where(enough, count, at_low), 0))
        at_high = tl.maximum(at_high, tl.max(tl.where(enough, at_high, count), 0))
        passes += 1
    least = tl.full([BLOCK], ABOVE_ALL, tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        key = order_key(scaled(line, token, token < vocab, heat))
        least = tl.minimum(least, tl.where((key >= low.to(tl.int32)) & (token < vocab), key, ABOVE_ALL))
    return tl.min(least, 0)


@triton.jit
def row_mass(line, vocab, heat, top, floor, BLOCK: tl.constexpr):
    """Mass of the row's tokens whose value is >= floor."""
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = scaled(line, token, token < vocab, heat)
        mass += tl.where((x >= floor) & (token < vocab), weight_below(x, top), 0.0)
    return tl.sum(mass, 0)
