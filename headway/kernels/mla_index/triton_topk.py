"""Triton kernel of ``index_topk``: one program per token finds the least score that is taken, eight bits of it at a time,
then writes the positions in order. Ties are taken from the lowest position on, whatever the grid."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import next_power_of_2
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_math import load_logits, order_key

BLOCK = 4096
"""Scores that a program looks at together."""


@triton.jit
def ranks(ptr, mask):
    """int32 whose bits, read without a sign, rise with the score."""
    return order_key(load_logits(ptr, mask)) ^ -2147483648


@triton.jit
def next_digit(row, seen, edge, need, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """(edge, need) with eight bits more: ``edge`` are the bits above SHIFT + 8 of the least rank that is taken, and of the
    ranks that begin so ``need`` are."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([256], tl.int32)
    for start in range(0, seen, BLOCK):
        inside = start + lane < seen
        rank = ranks(row + start + lane, inside)
        alike = inside
        if SHIFT < 24:
            alike = alike & (((rank ^ edge) >> (SHIFT + 8)) == 0)
        counts += tl.histogram((rank >> SHIFT) & 255, 256, mask=alike)
    above = tl.sum(counts, axis=0) - tl.cumsum(counts, 0)  # of ranks with a higher digit
    digit = tl.sum((above >= need).to(tl.int32), axis=0)
    need -= tl.sum(tl.where(tl.arange(0, 256) == digit, above, 0), axis=0)
    return edge | (digit << SHIFT), need


@triton.jit(
    do_not_specialize=["size", "wanted"],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def index_topk_kernel(
    scores_ptr,  # f32 [N, size]
    positions_ptr,  # [N]
    selected_ptr,  # int32 [N, wanted]
    size,
    wanted,
    selected_stride,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(EARLY)
    seen = tl.minimum(tl.maximum(tl.load(positions_ptr + token), 0), size - 1) + 1
    out = selected_ptr + token * selected_stride
    lane = tl.arange(0, BLOCK)
    if seen <= wanted:
        for start in range(0, wanted, BLOCK):
            place = start + lane
            tl.store(out + place, tl.where(place < seen, place, -1), mask=place < wanted)
        return
    row = scores_ptr + token * size
    edge, need = next_digit(row, seen, 0, wanted, 24, BLOCK)
    edge, need = next_digit(row, seen, edge, need, 16, BLOCK)
    edge, need = next_digit(row, seen, edge, need, 8, BLOCK)
    edge, need = next_digit(row, seen, edge, need, 0, BLOCK)
    taken = 0
    ties = 0
    least = edge ^ -2147483648
    for start in range(0, seen, BLOCK):
        place = start + lane
        inside = place < seen
        key = ranks(row + place, inside) ^ -2147483648  # with a sign, to be compared
        tie = (inside & (key == least)).to(tl.int32)
        count = ties + tl.cumsum(tie, 0)
        take = (inside & (key > least)) | ((tie > 0) & (count <= need))
        at = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(out + at, place, mask=take & (at < wanted))
        taken += tl.sum(take.to(tl.int32), axis=0)
        ties += tl.sum(tie, axis=0)


def index_topk(scores: torch.Tensor, positions: torch.Tensor, selected: torch.Tensor) -> None:
    number, size = scores.shape
    assert scores.is_contiguous() and selected.stride(1) == 1, "rows must be contiguous"
    block = min(BLOCK, max(256, next_power_of_2(size)))
    index_topk_kernel[(number,)](
        scores, positions, selected, size, selected.shape[1], selected.stride(0), BLOCK=block, num_warps=8,
        **launch_early(scores.device),
    )  # fmt: skip
