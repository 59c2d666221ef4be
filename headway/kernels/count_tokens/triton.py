"""``count_tokens`` in Triton: programs (slot, part of the vocabulary), each a histogram of the slot's whole history.

Every program reads the history (from L2) and owns its counts, so there are no atomics on global memory, no clearing
pass, and saturation is exact. int16 counts could not be added atomically anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["bound"])
def count_tokens_kernel(
    counts, slots, history, prompt_len, num_tokens, num_slots, vocab, length, bound,
    BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        first = tl.program_id(1) * BINS
        known = tl.minimum(tl.load(num_tokens + slot), tl.minimum(bound, length))
        prompt = tl.load(prompt_len + slot)
        prompted = tl.zeros([BINS], tl.int32)
        generated = tl.zeros([BINS], tl.int32)
        for begin in range(0, known, BLOCK):
            position = begin + tl.arange(0, BLOCK)
            token = tl.load(history + slot * length + position, mask=position < known, other=-1)
            mine = (token >= first) & (token < first + BINS)
            place = tl.where(mine, token - first, 0)
            prompted += tl.histogram(place, BINS, mask=mine & (position < prompt))
            generated += tl.histogram(place, BINS, mask=mine & (position >= prompt))
        packed = tl.minimum(generated, 32767) - tl.where(prompted > 0, 32768, 0)
        token = first + tl.arange(0, BINS)
        tl.store(counts + slot * vocab + token, packed.to(tl.int16), mask=token < vocab)


def count_tokens(
    counts: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
    max_tokens_bound: int,
) -> None:
    """See the package."""
    num_slots, vocab = counts.shape
    if slots.numel() == 0:
        return
    bins = 2048
    count_tokens_kernel[(slots.numel(), triton.cdiv(vocab, bins))](
        counts, slots, history, prompt_len, num_tokens, num_slots, vocab, history.shape[1], max_tokens_bound,
        BINS=bins, BLOCK=1024, num_warps=8,
    )  # fmt: skip
