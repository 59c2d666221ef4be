"""``min_tokens`` in Triton: one program (one warp) per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def min_tokens_kernel(
    logits,
    slots,
    num_tokens,
    min_total,
    stop_counts,
    stop_ids,
    row_stride,
    vocab,
    num_slots,
    width,
    STOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        if tl.load(num_tokens + slot) < tl.load(min_total + slot):
            column = tl.arange(0, STOPS)
            count = tl.minimum(tl.load(stop_counts + 2 * slot + 1), width)
            token = tl.load(stop_ids + slot * width + column, mask=column < count, other=-1)
            nothing = tl.full([STOPS], float("-inf"), tl.float32)
            tl.store(logits + row * row_stride + token, nothing, mask=(token >= 0) & (token < vocab))


def min_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    min_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
) -> None:
    num_slots = num_tokens.numel()
    width = stop_ids.numel() // num_slots
    min_tokens_kernel[(logits.shape[0],)](
        logits, slots, num_tokens, min_total, stop_counts, stop_ids, logits.stride(0), logits.shape[1], num_slots,
        width, STOPS=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
