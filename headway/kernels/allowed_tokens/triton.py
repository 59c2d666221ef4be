"""``allowed_tokens`` in Triton: programs (row, part of the vocabulary), which load and store whole vectors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def allowed_tokens_kernel(
    logits, slots, allowed_on, allowed_bits, row_stride, vocab, num_slots, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    on = (slot >= 0) & (slot < num_slots)
    if tl.load(allowed_on + slot, mask=on, other=0) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(allowed_bits + slot * width + token // 32, mask=token < vocab, other=-1)
        forbidden = ((word >> (token % 32)) & 1) == 0
        place = logits + row * row_stride + token
        x = tl.load(place, mask=token < vocab, other=0.0)
        tl.store(place, tl.where(forbidden, float("-inf"), x), mask=token < vocab)


def allowed_tokens(
    logits: torch.Tensor, slots: torch.Tensor, allowed_on: torch.Tensor, allowed_bits: torch.Tensor
) -> None:
    num_rows, vocab = logits.shape
    num_slots = allowed_on.numel()
    width = allowed_bits.numel() // num_slots
    assert width * 32 >= vocab, "allowed_bits is narrower than the vocabulary"
    block = min(2048, triton.next_power_of_2(vocab))
    allowed_tokens_kernel[(num_rows, triton.cdiv(vocab, block))](
        logits, slots, allowed_on, allowed_bits, logits.stride(0), vocab, num_slots, width, BLOCK=block, num_warps=4
    )
