"""``sample`` in Triton, two launches for most mixtures of rows: ``triton_race`` reads the logits, ``triton_finish`` picks.

Five more (nine with TWICE) where the host says that a row may be wide; see ``triton_wide``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from headway.core.params import GREEDY_EPS
from headway.kernels.sample.reference import MIN_P, PENALTIES, RANDOM, TOP, TWICE, WIDE, WIDE_K
from headway.kernels.sample.tiles import SampleTile, splits_for, tile_for
from headway.kernels.sample.triton_finish import finish_kernel
from headway.kernels.sample.triton_race import race_kernel
from headway.kernels.sample.triton_wide import bound_kernel, narrow_kernel, record_words, wide_race_kernel
from headway.kernels.triton_early import launch_early

FINISH_REGISTERS = 128
"""Of the second kernel, most per thread: so that a processor holds two rows' programs. Fits without spilling."""


def sample(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    *_, flags = others
    return sample_with(tile_for(logits.shape[0], logits.shape[1], is_filtered(flags)), logits, *others)


def is_filtered(flags: int) -> bool:
    """Whether the kernels that filter are needed. These know penalties, too, so that there are no more kernels to compile."""
    return bool(flags & PENALTIES) or (bool(flags & RANDOM) and bool(flags & (TOP | MIN_P)))


def sample_with(
    tile: SampleTile,
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
    """``sample`` with a given tile, as benchmarks call it."""
    rows, vocab = logits.shape
    device, num_slots = logits.device, temperature.numel()
    # A rank may draw the best of its part of the vocabulary: its counts have the whole.
    assert not flags & PENALTIES or counts.shape[1] == vocab, "counts and logits differ in vocabulary"
    if rows == 0 or vocab == 1:
        nothing = (slots >= 0) & (slots < num_slots) & ~(logits[:, :1].sum(1) > float("-inf"))  # nor is NaN
        return -nothing.to(torch.int32)
    out = torch.empty(rows, dtype=torch.int32, device=device)
    filtered, penalties = is_filtered(flags), (counts, count_on, repetition, frequency, presence)
    searches = (2 if flags & TWICE else 1) if filtered and flags & WIDE else 0  # of wide rows
    chunks, words = triton.cdiv(vocab, tile.block), record_words(tile.levels, tile.wide_pivots)
    parts = chunks * (tile.block // tile.part)
    best_score = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    best_token = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    part_top, part_sum, hot, values, tokens = best_score, best_score, best_token, best_score, best_token
    wide = torch.empty(rows * words if searches else 1, dtype=torch.int64, device=device)
    if filtered:
        part_top = torch.empty(rows, parts, dtype=torch.float32, device=device)
        part_sum = torch.empty_like(part_top)
        hot = torch.empty(rows, parts, dtype=torch.int32, device=device)
        values = torch.empty(rows, tile.large, dtype=torch.float32, device=device)
        tokens = torch.empty(rows, tile.large, dtype=torch.int32, device=device)
    early = launch_early(device)
    race_kernel[(rows, chunks)](
        logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, *penalties, best_score, best_token, part_top,
        part_sum, logits.stride(0), vocab, num_slots, RANDOM=filtered or bool(flags & RANDOM), FILTER=filtered,
        GREEDY_EPS=GREEDY_EPS, BLOCK=tile.block, PART=tile.part, num_warps=tile.num_warps, **early,
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, *penalties, best_score, best_token, part_top,
        part_sum, hot, values, tokens, wide, out, logits.stride(0), vocab, num_slots, chunks, parts, searches,
        FILTER=filtered, GREEDY_EPS=GREEDY_EPS, CHUNKS=triton.next_power_of_2(chunks),
        PARTS=triton.next_power_of_2(parts), PART=tile.part, GATHER=tile.gather, SMALL=tile.small, LARGE=tile.large,
        PIVOTS=tile.pivots, WIDE_K=WIDE_K, WORDS=words, num_warps=tile.finish_warps if filtered else 1,
        maxnreg=FINISH_REGISTERS, **early,
    )  # fmt: skip
    if searches:
        rates = (slots, temperature, top_k, top_p)
        _draw_wide(tile, logits, rates, seeds, num_tokens, penalties, wide.view(rows, words), tokens, out, searches)
    return out


def _draw_wide(
    tile: SampleTile,
    logits: torch.Tensor,
    rates: tuple[torch.Tensor, ...],
    seeds: torch.Tensor,
    num_tokens: torch.Tensor,
    penalties: tuple[torch.Tensor, ...],
    wide: torch.Tensor,
    keys: torch.Tensor,
    out: torch.Tensor,
    searches: int,
) -> None:
    """Finish the rows that ``finish_kernel`` opened in ``wide`` (int64 [N, words]); ``keys``: int32 [N, LARGE], scratch."""
    rows, vocab = logits.shape
    grid = (rows, splits_for(rows, triton.cdiv(vocab, tile.segment)))
    size = {"WORDS": wide.shape[1], "SEGMENT": tile.segment}
    for _ in range(searches):
        for level in range(tile.levels):
            narrow_kernel[grid](
                logits, *rates, *penalties, wide, logits.stride(0), vocab, level, PIVOTS=tile.wide_pivots, BLOCK=512, **size,
                num_warps=4,
            )  # fmt: skip
        bound_kernel[grid](
            logits, *rates, *penalties, wide, keys, logits.stride(0), vocab, LEVELS=tile.levels, PIVOTS=tile.wide_pivots,
            SMALL=tile.small, LARGE=tile.large, ROW_PIVOTS=tile.pivots, **size, num_warps=8,
        )  # fmt: skip
    slots, temperature, *_ = rates
    wide_race_kernel[grid](
        logits, slots, temperature, seeds, num_tokens, *penalties, wide, out, logits.stride(0), vocab, BLOCK=1024, **size,
        num_warps=4,
    )  # fmt: skip
