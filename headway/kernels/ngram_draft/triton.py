"""``ngram_draft`` in Triton.

1. ``search_kernel`` (row, part of its text): the best place of the part, packed as length << 32 | place.
2. ``guess_kernel`` (row): the best of these, and what followed it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
MOST_PARTS = 32
PROGRAMS = 256
"""Texts are cut into parts while there are fewer programs than this."""


@triton.jit
def search_kernel(
    row_slots, history, num_tokens, best, num_slots, length, min_n, max_n, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(row_slots + row).to(tl.int64)
    real = (slot >= 0) & (slot < num_slots)
    known = tl.minimum(tl.load(num_tokens + slot, mask=real, other=0), length)
    text = history + slot * length
    share = tl.cdiv(tl.cdiv(known - 1, PARTS), BLOCK) * BLOCK
    first = part * share
    end = tl.minimum(first + share, known - 1)
    score = tl.full([BLOCK], -1, tl.int64)
    for begin in range(first, end, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        equal = place < end
        matched = tl.zeros([BLOCK], tl.int32)
        for back in range(0, max_n):
            # The end has a token there wherever a place before it has.
            last = tl.load(text + known - 1 - back, mask=known - 1 - back >= 0, other=-1)
            token = tl.load(text + place - back, mask=equal & (place >= back), other=-1)
            equal = equal & (place >= back) & (token == last)
            matched += equal.to(tl.int32)
        found = (matched.to(tl.int64) << 32) | place.to(tl.int64)
        score = tl.maximum(score, tl.where(matched >= min_n, found, -1))
    tl.store(best + row * PARTS + part, tl.max(score, 0))


@triton.jit
def guess_kernel(
    drafts, row_slots, history, num_tokens, best, num_slots, length, number, PARTS: tl.constexpr, PLACES: tl.constexpr
):
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    real = (slot >= 0) & (slot < num_slots)
    known = tl.minimum(tl.load(num_tokens + slot, mask=real, other=0), length)
    if known > 0:
        score = tl.max(tl.load(best + row * PARTS + tl.arange(0, PARTS)), 0)
        place = tl.where(score >= 0, (score & 0xFFFFFFFF).to(tl.int32), known - 2)
        ahead = tl.arange(0, PLACES)
        source = place + 1 + ahead % tl.maximum(known - 1 - place, 1)
        guess = tl.load(history + slot * length + source, mask=ahead < number, other=0)
        tl.store(drafts + slot * number + ahead, guess, mask=ahead < number)


def ngram_draft(
    drafts: torch.Tensor,
    row_slots: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    min_n: int,
    max_n: int,
) -> None:
    (num_slots, length), rows = history.shape, row_slots.numel()
    number = drafts.shape[1]
    if not rows:
        return
    wanted = min(triton.cdiv(PROGRAMS, rows), triton.cdiv(length, BLOCK), MOST_PARTS)
    parts = triton.next_power_of_2(wanted)
    best = torch.empty(rows * parts, dtype=torch.int64, device=drafts.device)
    search_kernel[(rows, parts)](
        row_slots, history, num_tokens, best, num_slots, length, min_n, max_n, PARTS=parts, BLOCK=BLOCK, num_warps=4
    )
    guess_kernel[(rows,)](
        drafts, row_slots, history, num_tokens, best, num_slots, length, number,
        PARTS=parts, PLACES=triton.next_power_of_2(number), num_warps=1,
    )  # fmt: skip
