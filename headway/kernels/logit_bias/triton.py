"""``logit_bias`` in Triton: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def logit_bias_kernel(
    logits, slots, bias_counts, bias_ids, bias_values, row_stride, vocab, num_slots, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        count = tl.minimum(tl.load(bias_counts + slot), width)
        for begin in range(0, count, BLOCK):
            entry = begin + tl.arange(0, BLOCK)
            token = tl.load(bias_ids + slot * width + entry, mask=entry < count, other=-1)
            mask = (token >= 0) & (token < vocab)
            value = tl.load(bias_values + slot * width + entry, mask=mask, other=0.0)
            place = logits + row * row_stride + token
            tl.store(place, tl.load(place, mask=mask, other=0.0) + value, mask=mask)


def logit_bias(
    logits: torch.Tensor,
    slots: torch.Tensor,
    bias_counts: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    num_slots = bias_counts.numel()
    width = bias_ids.numel() // num_slots
    logit_bias_kernel[(logits.shape[0],)](
        logits, slots, bias_counts, bias_ids, bias_values, logits.stride(0), logits.shape[1], num_slots, width,
        BLOCK=min(256, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
