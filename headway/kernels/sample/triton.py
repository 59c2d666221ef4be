"""``sample`` in Triton: launchers. Greedy and plain temperature sampling read the logits once: (row, chunk) programs
race their tokens, one program per row compares the chunks. Filters first turn into one threshold per row (see
``triton_thresholds``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.params import GREEDY_EPS
from headway.kernels.sample.reference import MIN_P, RANDOM, TOP
from headway.kernels.sample.triton_thresholds import thresholds
from headway.kernels.triton_math import load_logits


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
def log_exponential(bits):
    """log(E), E = -log(1 - u). Below 1/16 the series of -log(1 - u): 1 - u would lose the low bits of u."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    series = 0.16666667 + u * 0.14285714
    series = 0.2 + u * series
    series = 0.25 + u * series
    series = 0.33333334 + u * series
    series = u * (1.0 + u * (0.5 + u * series))
    return tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit
def race_kernel(
    logits, slots, temperature, bounds, seeds, num_tokens, best_score, best_token, row_stride, vocab, num_slots,
    RANDOM: tl.constexpr, FILTER: tl.constexpr, GREEDY_EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = token < vocab
        x = load_logits(logits + row * row_stride + token, mask)
        if RANDOM:
            heat = tl.load(temperature + slot)
            if heat >= GREEDY_EPS:
                x = tl.math.div_rn(x, tl.zeros_like(x) + heat)
                if FILTER:
                    x = tl.where(x >= tl.load(bounds + row), x, float("-inf"))
                bits = token_bits(
                    tl.load(seeds + 2 * slot), tl.load(seeds + 2 * slot + 1), tl.load(num_tokens + slot), token
                )
                x = x - log_exponential(bits)
        score, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_score + row * tl.num_programs(1) + chunk, score)
        tl.store(best_token + row * tl.num_programs(1) + chunk, chunk * BLOCK + place)


@triton.jit
def winner_kernel(slots, best_score, best_token, out, num_slots, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    on = (slot >= 0) & (slot < num_slots)
    chunk = tl.arange(0, CHUNKS)
    mask = on & (chunk < chunks)
    score = tl.load(best_score + row * chunks + chunk, mask=mask, other=float("-inf"))
    token = tl.load(best_token + row * chunks + chunk, mask=mask, other=2147483647)
    winner = tl.min(tl.where(score == tl.max(score, 0), token, 2147483647), 0)
    tl.store(out + row, tl.where(on, winner, 0))


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    num_tokens: torch.Tensor,
    flags: int,
) -> torch.Tensor:
    """See the package."""
    rows, vocab = logits.shape
    num_slots = temperature.numel()
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    filtered = bool(flags & RANDOM) and bool(flags & (TOP | MIN_P))
    bounds = temperature
    if filtered:
        bounds = thresholds(logits, slots, temperature, top_k, top_p, min_p, search=bool(flags & TOP))
    # An argmax does not care how the row is cut: few rows need small chunks to fill the GPU, many rows large ones.
    block = min(1024 if rows < 32 else 4096, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, block)
    best_score = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    race_kernel[(rows, chunks)](
        logits, slots, temperature, bounds, seeds, num_tokens, best_score, best_token, logits.stride(0), vocab,
        num_slots, RANDOM=bool(flags & RANDOM), FILTER=filtered, GREEDY_EPS=GREEDY_EPS, BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    winner_kernel[(rows,)](
        slots, best_score, best_token, out, num_slots, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1
    )
    return out
