"""``slot_advance`` in Triton: one program (one warp) per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.triton_early import launch_early, start_next


@triton.jit
def _finish_code(token, before, slot, length, min_total, max_total, stop_counts, stop_ids, width, STOPS: tl.constexpr):
    """core.plan.Finish of a row that samples ``token``."""
    column = tl.arange(0, STOPS)
    num_eos = tl.load(stop_counts + 2 * slot)
    num_stops = tl.minimum(tl.load(stop_counts + 2 * slot + 1), width)
    listed = column < num_stops
    hit = listed & (tl.load(stop_ids + slot * width + column, mask=listed, other=-1) == token)
    index = tl.min(tl.where(hit, column, STOPS), 0)
    stops = (index < STOPS) & (before >= tl.load(min_total + slot))
    ended = before + 1 >= tl.minimum(tl.load(max_total + slot), length)
    return tl.where(stops, tl.where(index < num_eos, 1, 2), tl.where(ended, 3, 0))


@triton.jit
def slot_advance_kernel(
    packed, row_slots, token_ids, history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total,
    stop_counts, stop_ids, results, packed_size, num_slots, length, vocab, width, ring_size, ring_stride,
    STOPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row = tl.program_id(0)
    ring = tl.load(packed + 5)
    at = tl.load(packed + 4).to(tl.int64) + 4 * row
    slot = tl.load(row_slots + row).to(tl.int64)
    live = (row < tl.load(packed + 2)) & (at >= 0) & (at + 3 < packed_size) & (slot >= 0) & (slot < num_slots)
    live = live & (tl.load(alive + slot, mask=live, other=0) != 0)
    sampled = 0
    token = 0
    finish = 0
    total = 0
    if live:
        tl.store(num_computed + slot, tl.load(num_computed + slot) + tl.load(packed + at + 1))
        total = tl.load(num_tokens + slot)
        if tl.load(packed + at + 3) != 0:
            sampled = 1
            token = tl.load(token_ids + row)
            finish = _finish_code(token, total, slot, length, min_total, max_total, stop_counts, stop_ids, width, STOPS)
            finish = tl.where(token < 0, 4, finish)
            written = tl.maximum(token, 0)
            tl.store(history + slot * length + total, written, mask=(total >= 0) & (total < length))
            counted = (tl.load(count_on + slot) != 0) & (token >= 0) & (token < vocab)
            count = tl.load(counts + slot * vocab + token, mask=counted, other=0).to(tl.int32)
            counted = counted & ((count & 32767) != 32767)
            tl.store(counts + slot * vocab + token, (count + 1).to(tl.int16), mask=counted)
            total += 1
            tl.store(num_tokens + slot, total)
            tl.store(alive + slot, 0, mask=finish != 0)
            token = written
    place = results + ring.to(tl.int64) * ring_stride + 4 * row
    inside = (ring >= 0) & (ring < ring_size)
    tl.store(place, sampled, mask=inside)
    tl.store(place + 1, token, mask=inside)
    tl.store(place + 2, finish, mask=inside)
    tl.store(place + 3, total, mask=inside)


def slot_advance(
    packed: torch.Tensor,
    row_slots: torch.Tensor,
    token_ids: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    min_total: torch.Tensor,
    max_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """See the package."""
    num_slots, length = history.shape
    width = stop_ids.numel() // num_slots
    assert results.shape[1] >= row_slots.numel(), "the result ring is narrower than the step"
    # Launched the usual way: grammar_advance, next, reads the drawn tokens before it waits (see triton_early).
    slot_advance_kernel[(row_slots.numel(),)](
        packed, row_slots, token_ids, history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total,
        stop_counts, stop_ids, results, packed.numel(), num_slots, length, counts.shape[1], width, results.shape[0],
        results.shape[1] * results.shape[2], STOPS=triton.next_power_of_2(width), EARLY=launch_early(packed.device)["EARLY"],
        num_warps=1,
    )  # fmt: skip
