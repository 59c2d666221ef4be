"""``sample`` in Triton, two launches for any mixture of rows: ``triton_race`` reads the logits, ``triton_finish`` picks."""

from __future__ import annotations

import torch
import triton

from headway.core.params import GREEDY_EPS
from headway.kernels.sample.reference import MIN_P, RANDOM, TOP
from headway.kernels.sample.tiles import SampleTile, tile_for
from headway.kernels.sample.triton_finish import finish_kernel
from headway.kernels.sample.triton_race import race_kernel


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
    filtered = bool(flags & RANDOM) and bool(flags & (TOP | MIN_P))
    tile = tile_for(logits.shape[0], logits.shape[1], filtered)
    return sample_with(tile, logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, flags)


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
    flags: int,
) -> torch.Tensor:
    """``sample`` with a given tile, as benchmarks call it."""
    rows, vocab = logits.shape
    device, num_slots = logits.device, temperature.numel()
    out = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    filtered = bool(flags & RANDOM) and bool(flags & (TOP | MIN_P))
    chunks = triton.cdiv(vocab, tile.block)
    parts = chunks * (tile.block // tile.part)
    best_score = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    best_token = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    part_top, part_sum, hot, values, tokens = best_score, best_score, best_token, best_score, best_token
    if filtered:
        part_top = torch.empty(rows, parts, dtype=torch.float32, device=device)
        part_sum = torch.empty_like(part_top)
        hot = torch.empty(rows, parts, dtype=torch.int32, device=device)
        values = torch.empty(rows, tile.large, dtype=torch.float32, device=device)
        tokens = torch.empty(rows, tile.large, dtype=torch.int32, device=device)
    race_kernel[(rows, chunks)](
        logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, best_score, best_token, part_top, part_sum,
        logits.stride(0), vocab, num_slots, RANDOM=bool(flags & RANDOM), FILTER=filtered, GREEDY_EPS=GREEDY_EPS,
        BLOCK=tile.block, PART=tile.part, num_warps=tile.num_warps,
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, best_score, best_token, part_top, part_sum,
        hot, values, tokens, out, logits.stride(0), vocab, num_slots, chunks, parts, FILTER=filtered,
        GREEDY_EPS=GREEDY_EPS, CHUNKS=triton.next_power_of_2(chunks), PARTS=triton.next_power_of_2(parts),
        PART=tile.part, GATHER=tile.gather, SMALL=tile.small, LARGE=tile.large, PIVOTS=tile.pivots,
        num_warps=tile.finish_warps if filtered else 1,
    )  # fmt: skip
    return out
