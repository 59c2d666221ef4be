"""``count_tokens`` in Triton.

1. ``clear_kernel`` (slot, part of the vocabulary): clears the slot's counts.
2. ``add_kernel`` (slot, part of the history): adds each token by an atomic operation on the 32-bit word of its count.

A count must stop at 32767, which an atomic addition does not. Slots that have generated more than that, which only a bound
above it lets happen, are counted by ``histogram_kernel``: each program reads the whole history and owns its part of the counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST = 32767
"""The largest count."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def clear_kernel(counts, slots, num_slots, vocab, BLOCK: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + slot * vocab + token, tl.zeros([BLOCK], tl.int16), mask=token < vocab)


@triton.jit
def _lengths(slot, prompt_len, num_tokens, length, bound):
    """(known tokens, prompt tokens) of a slot."""
    return tl.minimum(tl.load(num_tokens + slot), tl.minimum(bound, length)), tl.load(prompt_len + slot)


@triton.jit(do_not_specialize=["bound"], do_not_specialize_on_alignment=["slots"])
def histogram_kernel(
    counts, slots, history, prompt_len, num_tokens, num_slots, vocab, length, bound, least,
    MOST: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        known, prompt = _lengths(slot, prompt_len, num_tokens, length, bound)
        if known - prompt >= least:
            first = tl.program_id(1) * BINS
            prompted = tl.zeros([BINS], tl.int32)
            generated = tl.zeros([BINS], tl.int32)
            for begin in range(0, known, BLOCK):
                position = begin + tl.arange(0, BLOCK)
                token = tl.load(history + slot * length + position, mask=position < known, other=-1)
                mine = (token >= first) & (token < first + BINS)
                place = tl.where(mine, token - first, 0)
                prompted += tl.histogram(place, BINS, mask=mine & (position < prompt))
                generated += tl.histogram(place, BINS, mask=mine & (position >= prompt))
            packed = tl.minimum(generated, MOST) - tl.where(prompted > 0, MOST + 1, 0)
            token = first + tl.arange(0, BINS)
            tl.store(counts + slot * vocab + token, packed.to(tl.int16), mask=token < vocab)


@triton.jit
def _is_repeated(slots, index, slot, BLOCK: tl.constexpr):
    """Whether an earlier entry of the list names the same slot."""
    found = 0
    for begin in range(0, index, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        found += tl.sum((tl.load(slots + other, mask=other < index, other=-1) == slot).to(tl.int32), 0)
    return found > 0


@triton.jit(do_not_specialize=["bound"], do_not_specialize_on_alignment=["slots"])
def add_kernel(
    words, slots, history, prompt_len, num_tokens, num_slots, vocab, length, bound,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        known, prompt = _lengths(slot, prompt_len, num_tokens, length, bound)
        begin = tl.program_id(1) * BLOCK
        due = (begin < known) & (known - prompt <= MOST)
        if due:
            due = not _is_repeated(slots, tl.program_id(0), slot, 128)
        if due:
            position = begin + tl.arange(0, BLOCK)
            token = tl.load(history + slot * length + position, mask=position < known, other=-1)
            counted = (token >= 0) & (token < vocab)
            place = slot * vocab + token
            shift = (place & 1).to(tl.int32) * 16  # little-endian: the odd element is the high half
            one = tl.full([BLOCK], 1, tl.int32)
            in_prompt = position < prompt
            tl.atomic_or(words + place // 2, (one << 15) << shift, mask=counted & in_prompt, sem="relaxed")
            tl.atomic_add(words + place // 2, one << shift, mask=counted & (position >= prompt), sem="relaxed")


def count_tokens(
    counts: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
    max_tokens_bound: int,
) -> None:
    num_slots, vocab = counts.shape
    if slots.numel() == 0:
        return
    length, number = history.shape[1], slots.numel()
    longest = max(1, min(max_tokens_bound, length))
    shared = (slots, history, prompt_len, num_tokens, num_slots, vocab, length, max_tokens_bound)
    whole_words = counts.numel() % 2 == 0  # else the last count has none to be added in
    if whole_words:
        clear_kernel[(number, triton.cdiv(vocab, 4096))](counts, slots, num_slots, vocab, BLOCK=4096, num_warps=4)
        words = counts.view(-1).view(torch.int32)
        add_kernel[(number, triton.cdiv(longest, 512))](words, *shared, MOST=MOST, BLOCK=512, num_warps=4)
    if not whole_words or longest > MOST:
        least = MOST + 1 if whole_words else -(2**31)
        histogram_kernel[(number, triton.cdiv(vocab, 2048))](
            counts, *shared, least, MOST=MOST, BINS=2048, BLOCK=1024, num_warps=8
        )
