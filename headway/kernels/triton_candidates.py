"""Finding a row's few largest logits without reading all of them: device functions that several kernels share.

A kernel that has read the row leaves the maximum of each *part*, PART neighbouring logits. A floor that surely lets enough
tokens through follows from the maxima alone, and only parts whose maximum reaches it are read again.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.triton_math import comparable, float_of_key, order_key


@triton.jit
def penalised_row(line, slot, vocab, counts, count_on, repetition, frequency, presence):
    """What ``read_row`` takes for the logits at ``line`` with the slot's penalties."""
    on = tl.load(count_on + slot) != 0
    r, f, p = tl.load(repetition + slot), tl.load(frequency + slot), tl.load(presence + slot)
    return line, counts + slot * vocab, on, r, tl.math.div_rn(tl.zeros_like(r) + 1.0, r), f, p


@triton.jit
def read_row(line, token, mask):
    """f32 logits of a row, as ``load_logits`` gives them. ``line``: (pointer,), or what ``penalised_row`` gave."""
    return penalised(tl.load(line[0] + token, mask=mask, other=float("-inf")), line, token, mask)


@triton.jit
def penalised(x, line, token, mask):
    """What ``read_row`` makes of the logits ``x``, loaded as it does.

    Every kernel that reads a row reads the same numbers: what one of them contracts to fewer roundings is written out.
    """
    x = x.to(tl.float32)
    if len(line) > 1:
        if line[2]:
            count = tl.load(line[1] + token, mask=mask, other=0).to(tl.int32)
            times = (count & 32767).to(tl.float32)
            x = tl.where(count != 0, x * tl.where(x > 0, line[4], line[3]), x)
            x = tl.where(times > 0, tl.fma(times, tl.zeros_like(x) - line[5], x) - line[6], x)
    return comparable(x)


@triton.jit
def scaled(line, token, mask, heat):
    """f32 logits over the temperature; arguments as in ``read_row``."""
    x = read_row(line, token, mask)
    return tl.math.div_rn(x, tl.zeros_like(x) + heat)


@triton.jit
def count_floor(tops, top, k):
    """A value, or -inf, that at least ``k`` of the parts' maxima and so at least k tokens reach; few more do."""
    low = order_key(float("-inf") + tl.zeros_like(top)).to(tl.int64)
    high = order_key(top).to(tl.int64) + 1
    while high - low > 65536:  # a 1/128 of the value: close enough
        middle = low + (high - low) // 2
        enough = tl.sum((tops >= float_of_key(middle.to(tl.int32))).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return float_of_key(low.to(tl.int32))


@triton.jit
def collect(
    line, tops, floor, heat, vocab, parts, hot, values, tokens,
    PARTS: tl.constexpr, PART: tl.constexpr, GATHER: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """Copy the values >= floor (logits over ``heat``) and their tokens, lowest first; returns how many, or more than LARGE.

    ``line``: as in ``read_row``.
    ``hot``: int32 [parts], scratch; ``values``, ``tokens``: f32 and int32 [LARGE].
    """
    part = tl.arange(0, PARTS)
    is_hot = (part < parts) & (tops >= floor)
    tl.store(hot + tl.cumsum(is_hot.to(tl.int32), 0) - 1, part, mask=is_hot)
    num_hot = tl.sum(is_hot.to(tl.int32), 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it
    size = 0
    begin = 0
    while (begin < num_hot) & (size <= LARGE):
        lane = tl.arange(0, GATHER)
        which = begin + lane // PART
        token = tl.load(hot + which, mask=which < num_hot, other=0) * PART + lane % PART
        mask = (which < num_hot) & (token < vocab)
        x = scaled(line, token, mask, heat)
        kept = mask & (x >= floor)
        place = size + tl.cumsum(kept.to(tl.int32), 0) - 1
        kept_in = kept & (place < LARGE)
        tl.store(values + place, x, mask=kept_in)
        tl.store(tokens + place, token, mask=kept_in)
        size += tl.sum(kept.to(tl.int32), 0)
        begin += GATHER // PART
    tl.debug_barrier()
    return size
