"""The thresholds of top_k, top_p and min_p in Triton, exact and without a sort.

1. ``stats_kernel``   (row, chunk): maximum and sum of exponentials of the chunk.
2. ``level_kernel``   (row, chunk): tokens and mass at or above each of 16 levels below the row's maximum.
3. ``gather_kernel``  (row, chunk): copies the candidates, all tokens above the highest level that surely contains the
   threshold, next to each other. Counts of earlier chunks give each chunk its place: no atomics, one order.
4. ``bound_kernel``   (row): searches the integer keys of the candidates, 16 pivots a pass. Rows with too many
   candidates (flat distributions) search the whole row instead: slower, same meaning.

min_p alone needs only 1 and 4. The chunk size is fixed: sums must not depend on who shares the batch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.params import GREEDY_EPS
from headway.kernels.triton_math import float_of_key, load_logits, order_key, weight_below

CHUNK = 2048
MAX_CANDIDATES = 8192
LEVELS = 16


@triton.jit
def _levels(top, LEVELS: tl.constexpr):
    """Levels from 0.5 to 32 nats below the maximum, closer together near it."""
    return top - 0.5 * tl.exp2(0.4 * tl.arange(0, LEVELS).to(tl.float32))


@triton.jit
def _scaled(pointer, mask, heat):
    x = load_logits(pointer, mask)
    return tl.math.div_rn(x, tl.zeros_like(x) + heat)


@triton.jit
def _searches(slot, num_slots, temperature, top_k, top_p, vocab, GREEDY_EPS: tl.constexpr):
    """Whether the row draws at random with top_k or top_p."""
    on = (slot >= 0) & (slot < num_slots)
    k = tl.load(top_k + slot, mask=on, other=0)
    p = tl.load(top_p + slot, mask=on, other=1.0)
    on = on & (tl.load(temperature + slot, mask=on, other=0.0) >= GREEDY_EPS)
    return on & (((k > 0) & (k < vocab)) | (p < 1.0))


@triton.jit
def stats_kernel(
    logits, slots, temperature, chunk_max, chunk_sum, row_stride, vocab, num_slots,
    GREEDY_EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    on = (slot >= 0) & (slot < num_slots)
    heat = tl.load(temperature + slot, mask=on, other=0.0)
    if heat >= GREEDY_EPS:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(logits + row * row_stride + token, token < vocab, heat)
        top = tl.max(x, 0)
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(chunk_max + place, top)
        tl.store(chunk_sum + place, tl.sum(weight_below(x, top), 0))


@triton.jit
def _row_stats(chunk_max, chunk_sum, row, chunks, CHUNKS: tl.constexpr):
    """(maximum, sum of exp(x - maximum)) of a row."""
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(chunk_max + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    sums = tl.load(chunk_sum + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    top = tl.max(tops, 0)
    return top, tl.sum(sums * weight_below(tops, top), 0)


@triton.jit
def level_kernel(
    logits, slots, temperature, top_k, top_p, chunk_max, chunk_sum, level_count, level_mass, row_stride, vocab,
    num_slots, chunks, GREEDY_EPS: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if _searches(slot, num_slots, temperature, top_k, top_p, vocab, GREEDY_EPS):
        top, _ = _row_stats(chunk_max, chunk_sum, row, chunks, CHUNKS)
        level = _levels(top, LEVELS)
        count = tl.zeros([LEVELS], tl.int32)
        mass = tl.zeros([LEVELS], tl.float32)
        # Most chunks have nothing near the maximum.
        if tl.load(chunk_max + row * chunks + chunk) >= tl.min(level, 0):
            token = chunk * BLOCK + tl.arange(0, BLOCK)
            x = _scaled(logits + row * row_stride + token, token < vocab, tl.load(temperature + slot))
            above = x[:, None] >= level[None, :]
            count = tl.sum(above.to(tl.int32), 0)
            mass = tl.sum(tl.where(above, weight_below(x, top)[:, None], 0.0), 0)
        place = (row * chunks + chunk) * LEVELS + tl.arange(0, LEVELS)
        tl.store(level_count + place, count)
        tl.store(level_mass + place, mass)


@triton.jit
def _chosen_level(
    slot, row, top, total, top_k, top_p, min_p, level_count, level_mass, vocab, chunks,
    CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Highest level that surely contains the threshold and what its mass is taken of; LEVELS if there is none."""
    index = tl.arange(0, LEVELS)
    chunk = tl.arange(0, CHUNKS)
    place = (row * chunks + chunk[:, None]) * LEVELS + index[None, :]
    mask = (chunk < chunks)[:, None] & (index < LEVELS)[None, :]
    count = tl.sum(tl.load(level_count + place, mask=mask, other=0), 0)
    mass = tl.sum(tl.load(level_mass + place, mask=mask, other=0.0), 0)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    low = tl.load(min_p + slot)
    has_k = (k > 0) & (k < vocab)
    covers = _levels(top, LEVELS) <= tl.where(low > 0.0, top + tl.log(low), float("-inf"))  # all that min_p keeps
    # Without top_k and min_p the mass is the whole row's: the margin covers the rounding of both sums.
    enough = tl.where(low > 0.0, covers, mass >= p * total * 1.0001)
    enough = covers | tl.where(has_k, count >= k, enough)
    return tl.min(tl.where(enough, index, LEVELS), 0)


@triton.jit
def gather_kernel(
    logits, slots, temperature, top_k, top_p, min_p, chunk_max, chunk_sum, level_count, level_mass, candidates,
    num_candidates, row_stride, vocab, num_slots, chunks, MAX_CANDIDATES: tl.constexpr, GREEDY_EPS: tl.constexpr,
    CHUNKS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if _searches(slot, num_slots, temperature, top_k, top_p, vocab, GREEDY_EPS):
        top, total = _row_stats(chunk_max, chunk_sum, row, chunks, CHUNKS)
        choice = _chosen_level(
            slot, row, top, total, top_k, top_p, min_p, level_count, level_mass, vocab, chunks, CHUNKS, LEVELS
        )
        found = choice < LEVELS
        others = tl.arange(0, CHUNKS)
        counts = tl.load(
            level_count + (row * chunks + others) * LEVELS + choice, mask=found & (others < chunks), other=0
        )
        size = tl.sum(counts, 0)
        fits = found & (size <= MAX_CANDIDATES)
        if chunk == 0:
            tl.store(num_candidates + row, tl.where(fits, size, -1))
        mine = tl.sum(tl.where(others == chunk, counts, 0), 0)
        if fits & (mine > 0):
            level = tl.max(tl.where(tl.arange(0, LEVELS) == choice, _levels(top, LEVELS), float("-inf")), 0)
            begin = tl.sum(tl.where(others < chunk, counts, 0), 0)
            token = chunk * BLOCK + tl.arange(0, BLOCK)
            x = _scaled(logits + row * row_stride + token, token < vocab, tl.load(temperature + slot))
            kept = (x >= level) & (token < vocab)
            place = begin + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(candidates + row * MAX_CANDIDATES + place, x, mask=kept & (place < MAX_CANDIDATES))


@triton.jit
def _weights(values, begin, size, heat, top, floor, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(keys, weights) of one block of values: weight 1 or exp(x - top), 0 below ``floor`` and outside."""
    index = begin + tl.arange(0, BLOCK)
    x = _scaled(values + index, index < size, heat)
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if MASS:
        weight = weight_below(x, top)
    return order_key(x), tl.where((index < size) & (x >= floor), weight, 0.0)


@triton.jit
def _total(values, size, heat, top, floor, BLOCK: tl.constexpr):
    """Mass of the values that are >= floor."""
    acc = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        _, weight = _weights(values, begin, size, heat, top, floor, True, BLOCK)
        acc += weight
    return tl.sum(acc, 0)


@triton.jit
def _largest(values, size, heat, top, floor, target, MASS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest t >= floor such that the values >= t number (or weigh) at least ``target``; floor if there is none."""
    low = order_key(floor).to(tl.int64)
    high = order_key(top).to(tl.int64) + 1
    pivot_index = tl.arange(0, PIVOTS) + 1
    while high - low > 1:
        stride = (high - low + PIVOTS - 1) // PIVOTS
        pivots = low + stride * pivot_index
        acc = tl.zeros([BLOCK, PIVOTS], tl.float32)
        for begin in range(0, size, BLOCK):
            key, weight = _weights(values, begin, size, heat, top, floor, MASS, BLOCK)
            acc += tl.where(key.to(tl.int64)[:, None] >= pivots[None, :], weight[:, None], 0.0)
        reached = (tl.sum(acc, 0) >= target) & (pivots < high)
        steps = tl.sum(reached.to(tl.int64), 0)  # more weight at or above a lower pivot: the reached ones come first
        low += stride * steps
        high = tl.minimum(high, low + stride)
    return float_of_key(low.to(tl.int32))


@triton.jit
def _search(values, size, heat, top, floor, total, k, p, has_k, whole, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The bound of top_k, then top_p. ``whole``: the mass of the values is not all there is, it is ``total``."""
    if has_k:
        floor = _largest(values, size, heat, top, floor, k.to(tl.float32), False, PIVOTS, BLOCK)
    if p < 1.0:
        mass = total
        if not whole:
            mass = _total(values, size, heat, top, floor, BLOCK)
        floor = _largest(values, size, heat, top, floor, p * mass, True, PIVOTS, BLOCK)
    return floor


@triton.jit
def bound_kernel(
    logits, slots, temperature, top_k, top_p, min_p, chunk_max, chunk_sum, candidates, num_candidates, bounds,
    row_stride, vocab, num_slots, chunks, SEARCH: tl.constexpr, MAX_CANDIDATES: tl.constexpr, GREEDY_EPS: tl.constexpr,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    on = (slot >= 0) & (slot < num_slots)
    heat = tl.load(temperature + slot, mask=on, other=0.0)
    bound = float("-inf")
    if heat >= GREEDY_EPS:
        top, total = _row_stats(chunk_max, chunk_sum, row, chunks, CHUNKS)
        low = tl.load(min_p + slot)
        bound = tl.where(low > 0.0, top + tl.log(low), float("-inf"))
        if SEARCH:
            k = tl.load(top_k + slot)
            p = tl.load(top_p + slot)
            has_k = (k > 0) & (k < vocab)
            if (has_k | (p < 1.0)) & (top > float("-inf")):
                size = tl.load(num_candidates + row)
                if size >= 0:
                    whole = (not has_k) & (low <= 0.0)
                    part = candidates + row * MAX_CANDIDATES
                    bound = _search(part, size, 1.0, top, bound, total, k, p, has_k, whole, PIVOTS, BLOCK)
                else:
                    line = logits + row * row_stride
                    bound = _search(line, vocab, heat, top, bound, total, k, p, has_k, False, PIVOTS, BLOCK)
    tl.store(bounds + row, bound)


def thresholds(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    search: bool,
) -> torch.Tensor:
    """The least x = logit / temperature that a row may draw, f32 [N]; -inf for greedy and padding rows.

    Args:
        logits, slots, temperature, top_k, top_p, min_p: as in ``sample``.
        search: False ignores top_k and top_p.
    """
    rows, vocab = logits.shape
    num_slots, chunks, device = temperature.numel(), triton.cdiv(vocab, CHUNK), logits.device
    padded = triton.next_power_of_2(chunks)
    chunk_max = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    chunk_sum = torch.empty_like(chunk_max)
    bounds = torch.empty(rows, dtype=torch.float32, device=device)
    stride, grid = logits.stride(0), (rows, chunks)
    stats_kernel[grid](
        logits, slots, temperature, chunk_max, chunk_sum, stride, vocab, num_slots,
        GREEDY_EPS=GREEDY_EPS, BLOCK=CHUNK, num_warps=4,
    )  # fmt: skip
    candidates = num_candidates = bounds
    if search:
        level_count = torch.empty(rows, chunks, LEVELS, dtype=torch.int32, device=device)
        level_mass = torch.empty(rows, chunks, LEVELS, dtype=torch.float32, device=device)
        candidates = torch.empty(rows, MAX_CANDIDATES, dtype=torch.float32, device=device)
        num_candidates = torch.empty(rows, dtype=torch.int32, device=device)
        level_kernel[grid](
            logits, slots, temperature, top_k, top_p, chunk_max, chunk_sum, level_count, level_mass, stride, vocab,
            num_slots, chunks, GREEDY_EPS=GREEDY_EPS, CHUNKS=padded, LEVELS=LEVELS, BLOCK=CHUNK, num_warps=8,
        )  # fmt: skip
        gather_kernel[grid](
            logits, slots, temperature, top_k, top_p, min_p, chunk_max, chunk_sum, level_count, level_mass, candidates,
            num_candidates, stride, vocab, num_slots, chunks, MAX_CANDIDATES=MAX_CANDIDATES, GREEDY_EPS=GREEDY_EPS,
            CHUNKS=padded, LEVELS=LEVELS, BLOCK=CHUNK, num_warps=4,
        )  # fmt: skip
    bound_kernel[(rows,)](
        logits, slots, temperature, top_k, top_p, min_p, chunk_max, chunk_sum, candidates, num_candidates, bounds,
        stride, vocab, num_slots, chunks, SEARCH=search, MAX_CANDIDATES=MAX_CANDIDATES, GREEDY_EPS=GREEDY_EPS,
        CHUNKS=padded, PIVOTS=16, BLOCK=1024, num_warps=16,
    )  # fmt: skip
    return bounds
