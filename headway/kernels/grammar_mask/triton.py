"""``grammar_mask`` in Triton: programs (row, part of the vocabulary). Each lane reads one token's bytes through the automaton;
a program stops when all its lanes are dead or done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.automaton import CLASS_INTS

BLOCK, WARPS = 512, 4


@triton.jit
def next_state(table, state, byte, walks, num_states, num_classes, table_ints, CLASS_INTS: tl.constexpr):
    """The state after ``byte`` where ``walks``; 0 for whatever leaves the table."""
    group = tl.load(table + byte, mask=walks, other=0)
    at = state * num_classes + group
    inside = walks & (group >= 0) & (group < num_classes) & (at >= 0) & (CLASS_INTS + at // 2 < table_ints)
    pair = tl.load(table + CLASS_INTS + at // 2, mask=inside, other=0)
    following = (pair >> (16 * (at % 2))) & 0xFFFF
    return tl.where(inside & (following < num_states), following, 0)


@triton.jit
def grammar_mask_kernel(
    logits, slots, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, stop_counts, stop_ids,
    row_stride, vocab, num_slots, table_ints, num_words, stop_width, CLASS_INTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    known = (slot >= 0) & (slot < num_slots)
    if tl.load(grammar_on + slot, mask=known, other=0) != 0:
        num_states = tl.load(grammar_info + 3 * slot)
        num_classes = tl.load(grammar_info + 3 * slot + 1)
        start = tl.load(grammar_state + slot)
        start = tl.where((start > 0) & (start < num_states), start, 0)
        ends = (start > 0) & (start >= tl.load(grammar_info + 3 * slot + 2))
        table = grammar_table + slot * table_ints
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        real = token < vocab
        length = tl.load(vocabulary + num_words.to(tl.int64) * vocab + token, mask=real, other=0)
        state = tl.where(length > 0, start, 0)
        column = vocabulary + token
        done = 0
        longest = tl.max(tl.where(state != 0, tl.minimum(length, 4 * num_words), 0), 0)
        while done < longest:
            four = tl.load(column, mask=real & (state != 0) & (done < length), other=0)
            for i in tl.static_range(4):
                walks = (state != 0) & (done + i < length)
                following = next_state(
                    table, state, (four >> (8 * i)) & 255, walks, num_states, num_classes, table_ints, CLASS_INTS
                )
                state = tl.where(walks, following, state)
            done += 4
            column += vocab
            longest = tl.max(tl.where(state != 0, tl.minimum(length, 4 * num_words), 0), 0)
        allowed = state != 0
        num_eos = tl.minimum(tl.load(stop_counts + 2 * slot), stop_width)
        for i in range(num_eos):
            allowed = tl.where(token == tl.load(stop_ids + slot * stop_width + i), ends, allowed)
        place = logits + row * row_stride + token
        x = tl.load(place, mask=real, other=0.0)
        tl.store(place, tl.where(allowed, x, float("-inf")), mask=real)


def grammar_mask(
    logits: torch.Tensor,
    slots: torch.Tensor,
    grammar_on: torch.Tensor,
    grammar_info: torch.Tensor,
    grammar_state: torch.Tensor,
    grammar_table: torch.Tensor,
    vocabulary: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
) -> None:
    """See the package."""
    num_rows, vocab = logits.shape
    num_slots = grammar_on.numel()
    assert vocabulary.shape[1] == vocab, "the vocabulary is not the logits'"
    block = min(BLOCK, triton.next_power_of_2(vocab))
    grammar_mask_kernel[(num_rows, triton.cdiv(vocab, block))](
        logits, slots, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, stop_counts, stop_ids,
        logits.stride(0), vocab, num_slots, grammar_table.shape[1], vocabulary.shape[0] - 1,
        stop_ids.numel() // num_slots, CLASS_INTS=CLASS_INTS, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
