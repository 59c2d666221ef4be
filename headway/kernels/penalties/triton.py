"""``penalties`` in Triton: programs (row, part of the vocabulary); only seen tokens' logits are touched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def penalties_kernel(
    logits, slots, counts, count_on, repetition, frequency, presence, row_stride, vocab, num_slots, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    in_table = (slot >= 0) & (slot < num_slots)
    if tl.load(count_on + slot, mask=in_table, other=0) != 0:
        r = tl.load(repetition + slot)
        f = tl.load(frequency + slot)
        p = tl.load(presence + slot)
        if (r != 1.0) | (f != 0.0) | (p != 0.0):
            token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            count = tl.load(counts + slot * vocab + token, mask=token < vocab, other=0).to(tl.int32)
            seen = count != 0
            times = (count & 32767).to(tl.float32)
            place = logits + row * row_stride + token
            x = tl.load(place, mask=seen, other=1.0)  # not 0: its division takes the slow way
            x = tl.where(x > 0, tl.math.div_rn(x, tl.zeros_like(x) + r), x * r)
            x = tl.where(times > 0, x - f * times - p, x)
            tl.store(place, x, mask=seen)


def penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See the package."""
    num_rows, vocab = logits.shape
    assert counts.shape[1] == vocab, "counts and logits differ in vocabulary"
    block = min(4096, triton.next_power_of_2(vocab))
    penalties_kernel[(num_rows, triton.cdiv(vocab, block))](
        logits, slots, counts, count_on, repetition, frequency, presence, logits.stride(0), vocab, count_on.numel(),
        BLOCK=block, num_warps=4,
    )  # fmt: skip
