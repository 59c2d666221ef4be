"""``grammar_mask`` in Triton: programs (part of the vocabulary, share of the constrained rows).

Each lane reads one token's bytes through the automaton; a row is done when all lanes are dead or done. Every program finds
out for itself which rows have a grammar: one such row among 256 takes as few programs as among eight. Loads that wait for
no other are issued together: the weights have passed through the cache since the last mask, so each one in a chain is
a trip to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.automaton import CLASS_INTS
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

BLOCK, WARPS = 512, 4
PROGRAMS = 1152
"""About as many as run at once on a large device (nine on each of 132 processors); more would only wait for their turn."""


@triton.jit
def following_state(table, state, group, walks, num_states, num_classes, table_ints, CLASS_INTS: tl.constexpr):
    """The state after a byte of class ``group`` where ``walks``, else ``state``; 0 for whatever leaves the table."""
    at = state * num_classes + group
    inside = walks & (group >= 0) & (group < num_classes) & (at >= 0) & (CLASS_INTS + at // 2 < table_ints)
    pair = tl.load(table + CLASS_INTS + at // 2, mask=inside, other=0)
    following = (pair >> (16 * (at % 2))) & 0xFFFF
    return tl.where(walks, tl.where(inside & (following < num_states), following, 0), state)


@triton.jit(do_not_specialize=["num_rows"])
def grammar_mask_kernel(
    logits, slots, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, stop_counts, stop_ids,
    num_rows, row_stride, vocab, num_slots, table_ints, num_words, stop_width, CLASS_INTS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < vocab
    column = vocabulary + token
    length = tl.load(column + num_words.to(tl.int64) * vocab, mask=real, other=0)
    length = tl.minimum(length, 4 * num_words)
    first = tl.load(column, mask=real, other=0)
    index = tl.arange(0, ROWS)
    slot_of = tl.load(slots + index, mask=index < num_rows, other=-1)
    on = (slot_of >= 0) & (slot_of < num_slots)
    on = on & (tl.load(grammar_on + slot_of, mask=on, other=0) != 0)
    number = tl.cumsum(on.to(tl.int32), 0)  # of each constrained row, from 1
    for nth in range(tl.program_id(1), tl.max(number, 0), tl.num_programs(1)):
        row = tl.max(tl.where(on & (number == nth + 1), index, 0), 0).to(tl.int64)
        slot = tl.max(tl.where(index == row, slot_of, 0), 0).to(tl.int64)
        num_states = tl.load(grammar_info + 3 * slot)
        num_classes = tl.load(grammar_info + 3 * slot + 1)
        accepting = tl.load(grammar_info + 3 * slot + 2)
        start = tl.load(grammar_state + slot)
        num_eos = tl.minimum(tl.load(stop_counts + 2 * slot), stop_width)
        table = grammar_table + slot * table_ints
        four = first
        group = tl.load(table + (four & 255), mask=length > 0, other=0)

        start = tl.where((start > 0) & (start < num_states), start, 0)
        ends = (start > 0) & (start >= accepting)
        is_eos = token < 0
        for stop in range(num_eos):
            is_eos = is_eos | (token == tl.load(stop_ids + slot * stop_width + stop))
        state = tl.where(length > 0, start, 0)
        done = 0
        longest = tl.max(tl.where(state != 0, length, 0), 0)
        while done < longest:
            for i in tl.static_range(4):
                walks = (state != 0) & (done + i < length)
                state = following_state(table, state, group, walks, num_states, num_classes, table_ints, CLASS_INTS)
                if i < 3:
                    goes_on = (state != 0) & (done + i + 1 < length)
                    group = tl.load(table + ((four >> (8 * i + 8)) & 255), mask=goes_on, other=0)
            done += 4
            goes_on = (state != 0) & (done < length)
            longest = tl.max(tl.where(state != 0, length, 0), 0)
            four = tl.load(column + (done // 4) * vocab, mask=goes_on, other=0)
            group = tl.load(table + (four & 255), mask=goes_on, other=0)
        allowed = tl.where(is_eos, ends, state != 0)
        wait_for_inputs(EARLY)  # only the logits come from the kernel before
        tl.store(logits + row * row_stride + token, float("-inf"), mask=real & ~allowed)
    wait_for_inputs(EARLY)


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
    if num_rows == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(vocab))
    parts = triton.cdiv(vocab, block)
    # As wide as the engine has slots, not as the step has rows: one compilation serves all sizes.
    widest = triton.next_power_of_2(max(num_rows, num_slots))
    grammar_mask_kernel[(parts, max(1, min(num_rows, PROGRAMS // parts)))](
        logits, slots, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, stop_counts, stop_ids,
        num_rows, logits.stride(0), vocab, num_slots, grammar_table.shape[1], vocabulary.shape[0] - 1,
        stop_ids.numel() // num_slots, CLASS_INTS=CLASS_INTS, BLOCK=block, ROWS=widest, num_warps=WARPS,
        **launch_early(logits.device),
    )  # fmt: skip
