"""``cross_rows`` in Triton: a lane per token, which finds its row by halving."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv

BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_slots"])
def cross_rows_kernel(
    query_start,
    row_slots,
    seq_lens,
    encoder_lens,
    slots,
    lens,
    num_tokens,
    num_rows,
    num_slots,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    low = tl.zeros([BLOCK], tl.int32)  # the number of rows that end at the token or before it lies in [low, high]
    high = tl.zeros([BLOCK], tl.int32) + num_rows
    for _ in tl.static_range(HALVINGS):
        going = low < high
        middle = (low + high) // 2
        end = tl.load(query_start + middle + 1, mask=mask & going, other=0)
        behind = going & (end <= token)
        low = tl.where(behind, middle + 1, low)
        high = tl.where(going & (end > token), middle, high)
    inside = mask & (low < num_rows)
    slot = tl.load(row_slots + low, mask=inside, other=-1)
    length = tl.load(seq_lens + low, mask=inside, other=0)
    reads = inside & (length > 0) & (slot >= 0) & (slot < num_slots)
    tl.store(slots + token, tl.where(reads, slot, -1), mask=mask)
    tl.store(lens + token, tl.load(encoder_lens + slot, mask=reads, other=0), mask=mask)


def cross_rows(
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    num_tokens, num_rows = slots.shape[0], row_slots.shape[0]
    cross_rows_kernel[(cdiv(num_tokens, BLOCK),)](
        query_start, row_slots, seq_lens, encoder_lens, slots, lens, num_tokens, num_rows, encoder_lens.shape[0],
        HALVINGS=num_rows.bit_length(), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
