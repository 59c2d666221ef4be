"""``suffix_draft`` in Triton.

1. ``suffix_search_kernel`` (row, part of a text): the part's candidate, packed as length << 32 | place.
2. ``suffix_guess_kernel`` (row): what the candidates of the longest match agree on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.suffix_draft.reference import PARTS, SLACK

BLOCK = 1024


@triton.jit(do_not_specialize=["max_match"])
def suffix_search_kernel(
    row_slots, scope, history, num_tokens, store, cursor, best, num_slots, length, size, kept, max_match,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(row_slots + row).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    known = tl.minimum(tl.load(num_tokens + slot, mask=inside, other=0), length)
    reach = tl.load(scope + slot, mask=inside, other=0)
    own = part >= PARTS
    least = 2  # SHARED
    text = store
    number = size
    if own:
        least = 1
        text = history + slot * length
        number = known - 1
    share = tl.cdiv(number, PARTS)
    first = (part % PARTS) * share
    end = tl.minimum(first + share, number)
    end = tl.where(inside & (known > 0) & (reach >= least), end, first)
    written = tl.load(cursor)
    oldest = tl.load(cursor + 2 + tl.maximum(tl.load(cursor + 1) - kept, 0) % kept)
    mine = history + slot * length + known - 1
    score = tl.full([BLOCK], -1, tl.int64)
    for begin in range(first, end, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        equal = place < end
        when = (written - 1 - place) % size
        when = written - 1 - tl.where(when < 0, when + size, when)
        equal = equal & (own | ((when >= 0) & (when >= oldest)))
        matched = tl.zeros([BLOCK], tl.int32)
        back = 0
        going = tl.max(equal.to(tl.int32), 0)
        while going > 0:
            last = tl.load(mine - back, mask=known - 1 - back >= 0, other=-2)
            at = place - back
            at = tl.where((at < 0) & (part < PARTS), at + size, at)
            token = tl.load(text + at, mask=equal & (at >= 0), other=-3)
            equal = equal & (token == last)
            matched += equal.to(tl.int32)
            back += 1
            going = tl.where((back < max_match) & (own | (back < size)), tl.max(equal.to(tl.int32), 0), 0)
        found = matched > 0
        behind = tl.load(text + tl.where(own, place + 1, (place + 1) % size), mask=found, other=-1)
        found = found & (behind >= 0)
        score = tl.maximum(score, tl.where(found, (matched.to(tl.int64) << 32) | place.to(tl.int64), -1))
    tl.store(best + row * 2 * PARTS + part, tl.max(score, 0))


@triton.jit
def suffix_guess_kernel(
    drafts, row_slots, scope, history, num_tokens, store, best, num_slots, length, size, number, factor, min_prob,
    PARTS: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    known = tl.minimum(tl.load(num_tokens + slot, mask=inside, other=0), length)
    if (known > 0) & (tl.load(scope + slot, mask=inside, other=0) > 0):
        index = tl.arange(0, 2 * PARTS)
        score = tl.load(best + row * 2 * PARTS + index)
        matched = (score >> 32).to(tl.int32)
        most = tl.max(matched, 0)
        votes = (matched == most) & (matched >= 1)
        place = (score & 0xFFFFFFFF).to(tl.int32)
        text = history + slot * length
        last = tl.load(text + known - 1)
        limit = tl.where(most >= 1, (factor * most + SLACK).to(tl.int32), 0)
        chance = tl.full([], 1.0, tl.float32)
        going = 1
        for i in range(0, number):
            theirs = tl.load(
                text + place + 1 + i % tl.maximum(known - 1 - place, 1), mask=votes & (index >= PARTS), other=-1
            )
            kept = tl.load(store + (place + 1 + i) % size, mask=votes & (index < PARTS), other=-1)
            token = tl.where(index < PARTS, kept, theirs)
            able = votes & (token >= 0)
            marked = tl.where(able, token, -1)
            shares = tl.sum(((marked[:, None] == marked[None, :]) & able[:, None]).to(tl.int32), 1)
            key = tl.where(able, shares * (2 * PARTS) + index, -1)
            top = tl.max(key, 0)
            chosen = tl.max(tl.where(able & (key == top), token, -1), 0)
            chance *= (top // (2 * PARTS)).to(tl.float32) / tl.maximum(tl.sum(votes.to(tl.int32), 0), 1).to(tl.float32)
            goes_on = (top >= 0) & (i < limit) & (chance >= min_prob - SLACK)
            going = tl.where(goes_on, going, 0)
            tl.store(drafts + slot * number + i, tl.where(going > 0, chosen, last))
            votes = able & (token == chosen)


def suffix_draft(
    drafts: torch.Tensor,
    row_slots: torch.Tensor,
    scope: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    store: torch.Tensor,
    cursor: torch.Tensor,
    max_match: int,
    factor: float,
    min_prob: float,
) -> None:
    (num_slots, length), rows = history.shape, row_slots.numel()
    size = store.numel()
    if not rows:
        return
    best = torch.empty(rows * 2 * PARTS, dtype=torch.int64, device=drafts.device)
    suffix_search_kernel[(rows, 2 * PARTS)](
        row_slots, scope, history, num_tokens, store, cursor, best, num_slots, length, size, cursor.numel() - 2, max_match,
        PARTS=PARTS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    suffix_guess_kernel[(rows,)](
        drafts, row_slots, scope, history, num_tokens, store, best, num_slots, length, size, drafts.shape[1], factor,
        min_prob, PARTS=PARTS, SLACK=SLACK, num_warps=4,
    )  # fmt: skip
