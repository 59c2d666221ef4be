"""What ``sample`` means, in torch."""

from __future__ import annotations

import torch

from headway.core.params import GREEDY_EPS
from headway.kernels.sample.rng import log_exponential, token_bits

RANDOM, TOP, MIN_P, WIDE, TWICE, PENALTIES = 1, 2, 4, 8, 16, 32
"""Bits of ``flags``: some row has temperature >= 1e-5; some such row uses top_k or top_p; some such row uses min_p; some such
row's filters ``may_be_wide``; some such row uses top_p and a top_k above WIDE_K; some row has penalties."""

WIDE_K = 1024
"""A top_k up to this surely leaves few candidates, ties aside."""


def may_be_wide(top_k: int, top_p: float, min_p: float) -> bool:
    """Whether a random row with these filters may keep so many tokens that several programs should share its search."""
    return (top_k > WIDE_K or top_p < 1.0 or min_p > 0.0) and not 0 < top_k <= WIDE_K


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    num_tokens: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    flags: int,
) -> torch.Tensor:
    in_table = (slots >= 0) & (slots < temperature.shape[0])
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    numbers = (temperature, top_k, top_p, min_p)
    x = filtered_logits(logits, slots, *numbers, counts, count_on, repetition, frequency, presence, flags)
    if flags & RANDOM:
        bits = token_bits(seeds.index_select(0, slot), num_tokens.index_select(0, slot), logits.shape[1])
        x = x - log_exponential(bits) * (temperature.index_select(0, slot)[:, None] >= GREEDY_EPS)
    drawn = torch.where(x.amax(1) > float("-inf"), x.argmax(1), -1)
    return torch.where(in_table, drawn, 0).to(torch.int32)


def filtered_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    flags: int,
) -> torch.Tensor:
    inf = float("inf")
    in_table = (slots >= 0) & (slots < temperature.shape[0])
    slot = torch.where(in_table, slots, 0).to(torch.int64)
    x = logits.to(torch.float32)
    if flags & PENALTIES:
        x = _penalised(x, slot, in_table, counts, count_on, repetition, frequency, presence)
    x = torch.nan_to_num(x, nan=-inf, posinf=inf, neginf=-inf)
    if flags & RANDOM:
        heat = temperature.index_select(0, slot)[:, None]  # [N, 1]
        random = heat >= GREEDY_EPS
        x = x / torch.where(random, heat, 1.0)
        if flags & (TOP | MIN_P):
            k, p, low = (table.index_select(0, slot)[:, None] for table in (top_k, top_p, min_p))
            bound = _threshold(x, k, p, low) if flags & TOP else _min_p_threshold(x.amax(1, keepdim=True), low)
            x = torch.where((x >= bound) | ~random, x, -inf)
    return x


def _penalised(
    x: torch.Tensor,
    slot: torch.Tensor,
    in_table: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Lowers the tokens of ``x`` (f32 [N, V]) that occurred; ``slot`` int64 [N], of rows ``in_table``."""
    row_on = in_table & (count_on.index_select(0, slot) != 0)
    count = torch.where(row_on[:, None], counts.index_select(0, slot), 0)  # [N, V]
    times = (count & 32767).to(torch.float32)
    r, f, p = (table.index_select(0, slot)[:, None] for table in (repetition, frequency, presence))
    x = torch.where(count != 0, torch.where(x > 0, x / r, x * r), x)
    return torch.where(times > 0, x - f * times - p, x)


def _min_p_threshold(top: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    return torch.where(min_p > 0, top + min_p.log(), float("-inf"))


def _threshold(x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The least x that all filters keep, f32 [N, 1]. x: f32 [N, V]; the others [N, 1]."""
    off, vocab = float("-inf"), x.shape[1]
    down = x.sort(dim=1, descending=True).values
    top = down[:, :1]
    kth = down.gather(1, (top_k.to(torch.int64) - 1).clamp(0, vocab - 1))
    kth = torch.where((top_k > 0) & (top_k < vocab), kth, off)
    floor = torch.maximum(kth, _min_p_threshold(top, min_p))
    weight = torch.where(down == top, 1.0, (down - top).exp())  # also right when the largest is +inf
    mass = torch.where(down >= floor, weight, 0.0).cumsum(1, dtype=torch.float64)
    short = (mass < top_p.to(torch.float64) * mass[:, -1:]).sum(1, keepdim=True)  # tokens before the mass is reached
    nucleus = down.gather(1, short.clamp(max=vocab - 1))
    return torch.maximum(floor, torch.where(top_p < 1, nucleus, off))
