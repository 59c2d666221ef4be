"""``slot_advance`` in Triton: one program (one warp) per row. All but the token is loaded while that is still being drawn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs


@triton.jit
def slot_advance_kernel(
    packed, row_slots, token_ids, history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total,
    stop_counts, stop_ids, results, packed_size, num_slots, length, vocab, width, ring_size, ring_stride,
    STOPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ring = tl.load(packed + 5)
    at = tl.load(packed + 4).to(tl.int64) + 4 * row
    slot = tl.load(row_slots + row).to(tl.int64)
    live = (row < tl.load(packed + 2)) & (at >= 0) & (at + 3 < packed_size) & (slot >= 0) & (slot < num_slots)
    query_len = tl.load(packed + at + 1, mask=live, other=0)
    samples = tl.load(packed + at + 3, mask=live, other=0)
    computed = tl.load(num_computed + slot, mask=live, other=0)
    before = tl.load(num_tokens + slot, mask=live, other=0)
    least = tl.load(min_total + slot, mask=live, other=0)
    most = tl.minimum(tl.load(max_total + slot, mask=live, other=0), length)
    num_eos = tl.load(stop_counts + 2 * slot, mask=live, other=0)
    num_stops = tl.minimum(tl.load(stop_counts + 2 * slot + 1, mask=live, other=0), width)
    column = tl.arange(0, STOPS)
    stop_id = tl.load(stop_ids + slot * width + column, mask=live & (column < width), other=-1)
    counts_on = tl.load(count_on + slot, mask=live, other=0)
    live = live & (tl.load(alive + slot, mask=live, other=0) != 0)
    wait_for_inputs(EARLY)  # only the tokens come from kernels just before
    start_next(EARLY)  # not sooner: grammar_advance, next, reads the tokens before it waits
    sampled = 0
    token = 0
    finish = 0
    total = 0
    if live:
        tl.store(num_computed + slot, computed + query_len)
        total = before
        if samples != 0:
            sampled = 1
            token = tl.load(token_ids + row)
            index = tl.min(tl.where((column < num_stops) & (stop_id == token), column, STOPS), 0)
            stops = (index < STOPS) & (total >= least)
            finish = tl.where(stops, tl.where(index < num_eos, 1, 2), tl.where(total + 1 >= most, 3, 0))
            finish = tl.where(token < 0, 4, finish)
            written = tl.maximum(token, 0)
            tl.store(history + slot * length + total, written, mask=(total >= 0) & (total < length))
            counted = (counts_on != 0) & (token >= 0) & (token < vocab)
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
    slot_advance_kernel[(row_slots.numel(),)](
        packed, row_slots, token_ids, history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total,
        stop_counts, stop_ids, results, packed.numel(), num_slots, length, counts.shape[1], width, results.shape[0],
        results.shape[1] * results.shape[2], STOPS=triton.next_power_of_2(width), num_warps=1, **launch_early(packed.device),
    )  # fmt: skip
