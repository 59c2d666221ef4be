"""``bad_words`` in Triton: one program per row, one lane per phrase."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def bad_words_kernel(
    logits, slots, history, num_tokens, prompt_len, bw_counts, bw_offsets, bw_tokens, row_stride, vocab, num_slots,
    length, max_phrases, width, PHRASES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    in_table = (slot >= 0) & (slot < num_slots)
    count = tl.minimum(tl.load(bw_counts + slot, mask=in_table, other=0), max_phrases)
    if count > 0:
        known = tl.load(num_tokens + slot)
        generated = known - tl.load(prompt_len + slot)
        phrase = tl.arange(0, PHRASES)
        used = phrase < count
        offsets = bw_offsets + slot * (max_phrases + 1) + phrase
        begin = tl.load(offsets, mask=used, other=0)
        size = tl.load(offsets + 1, mask=used, other=0) - begin
        used = used & (begin >= 0) & (size > 0) & (begin + size <= width) & (size - 1 <= generated)
        words = bw_tokens + slot * width + begin
        first = known - (size - 1)  # history position that the phrase's first token must equal
        longest = tl.max(tl.where(used, size, 0), 0)
        for j in range(0, longest - 1):
            compare = used & (j < size - 1)
            position = first + j
            compare_in = compare & (position >= 0) & (position < length)
            wanted = tl.load(words + j, mask=compare, other=0)
            actual = tl.load(history + slot * length + position, mask=compare_in, other=-1)
            used = used & ((wanted == actual) | (j >= size - 1))
        final = tl.load(words + size - 1, mask=used, other=-1)
        nothing = tl.full([PHRASES], float("-inf"), tl.float32)
        tl.store(logits + row * row_stride + final, nothing, mask=used & (final >= 0) & (final < vocab))


def bad_words(
    logits: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    bw_counts: torch.Tensor,
    bw_offsets: torch.Tensor,
    bw_tokens: torch.Tensor,
) -> None:
    num_slots, length = history.shape
    max_phrases = bw_offsets.shape[1] - 1
    bad_words_kernel[(logits.shape[0],)](
        logits, slots, history, num_tokens, prompt_len, bw_counts, bw_offsets, bw_tokens, logits.stride(0),
        logits.shape[1], num_slots, length, max_phrases, bw_tokens.shape[1],
        PHRASES=triton.next_power_of_2(max_phrases), num_warps=2,
    )  # fmt: skip
