"""``synthetic_accept`` in Triton: a program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GOLDEN, MIXER = tl.constexpr(0x9E3779B1), tl.constexpr(0x7FEB352D)


@triton.jit(do_not_specialize=["offset", "always", "part"])
def synthetic_kernel(token_ids, row_slots, drafts, num_tokens, seeds, num_slots, number, offset, always, part, vocab):
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        token = tl.load(token_ids + row)
        draft = tl.load(drafts + slot * number + offset)
        mixed = tl.load(seeds + 2 * slot).to(tl.uint32, bitcast=True) * GOLDEN
        mixed += tl.load(num_tokens + slot).to(tl.uint32, bitcast=True)
        mixed = (mixed ^ (mixed >> 16)) * MIXER
        mixed = (mixed ^ (mixed >> 16)) * MIXER
        right = (offset < always) | ((offset == always) & ((mixed >> 8).to(tl.int32) < part))
        other = tl.where(token == draft, (token + 1) % vocab, token)
        tl.store(token_ids + row, tl.where(right, draft, other))


def synthetic_accept(
    token_ids: torch.Tensor,
    row_slots: torch.Tensor,
    drafts: torch.Tensor,
    num_tokens: torch.Tensor,
    seeds: torch.Tensor,
    offset: int,
    always: int,
    part: int,
    vocab: int,
) -> None:
    num_slots, number = drafts.shape
    if offset >= number or not row_slots.numel():
        return
    synthetic_kernel[(row_slots.numel(),)](
        token_ids, row_slots, drafts, num_tokens, seeds, num_slots, number, offset, always, part, vocab, num_warps=1
    )
