"""``grammar_advance`` in Triton: a program per row, four bytes at a time; loads that wait for no other are issued together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.automaton import CLASS_INTS
from headway.kernels.grammar_mask.triton import following_state
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs

NONE, EOS, LENGTH, NO_TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3), tl.constexpr(4)
"""core.plan.Finish."""


@triton.jit
def grammar_advance_kernel(
    packed, row_slots, token_ids, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, alive, results,
    num_slots, vocab, num_words, table_ints, ring_size, ring_stride, CLASS_INTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    ring = tl.load(packed + 5).to(tl.int64)
    known = (slot >= 0) & (slot < num_slots) & (ring >= 0) & (ring < ring_size)
    on = tl.load(grammar_on + slot, mask=known, other=0)
    num_states = tl.load(grammar_info + 3 * slot, mask=known, other=0)
    num_classes = tl.load(grammar_info + 3 * slot + 1, mask=known, other=0)
    accepting = tl.load(grammar_info + 3 * slot + 2, mask=known, other=0)
    before = tl.load(grammar_state + slot, mask=known, other=0)
    token = tl.load(token_ids + row)
    real = (token >= 0) & (token < vocab)
    length = tl.load(vocabulary + num_words.to(tl.int64) * vocab + token, mask=real & (on != 0), other=0)
    four = tl.load(vocabulary + token, mask=real, other=0)
    before = tl.where((before > 0) & (before < num_states), before, 0)
    length = tl.minimum(length, 4 * num_words)
    after = tl.where(length > 0, before, 0)
    table = grammar_table + slot * table_ints
    i = tl.zeros_like(length)
    while (i < length) & (after != 0):
        one = tl.load(table + (four & 255))
        two = tl.load(table + ((four >> 8) & 255))
        three = tl.load(table + ((four >> 16) & 255))
        last = tl.load(table + ((four >> 24) & 255))
        i += 4
        four = tl.load(vocabulary + (i // 4) * vocab + token, mask=i < length, other=0)
        walks = i - 4 < length
        after = following_state(table, after, one, walks, num_states, num_classes, table_ints, CLASS_INTS)
        walks = (i - 3 < length) & (after != 0)
        after = following_state(table, after, two, walks, num_states, num_classes, table_ints, CLASS_INTS)
        walks = (i - 2 < length) & (after != 0)
        after = following_state(table, after, three, walks, num_states, num_classes, table_ints, CLASS_INTS)
        walks = (i - 1 < length) & (after != 0)
        after = following_state(table, after, last, walks, num_states, num_classes, table_ints, CLASS_INTS)
    # Only the results come from the kernel before, which has let this one start behind its own wait.
    wait_for_inputs(EARLY)
    result = results + ring * ring_stride + 4 * row
    if (on != 0) & (tl.load(result, mask=known, other=0) != 0):
        finish = tl.load(result + 2)
        goes_on = (finish == NONE) | (finish == LENGTH)
        tl.store(grammar_state + slot, after, mask=goes_on)
        broken = (goes_on & (after == 0)) | ((finish == EOS) & (before < tl.maximum(accepting, 1)))
        tl.store(result + 2, NO_TOKEN, mask=broken)
        tl.store(alive + slot, 0, mask=broken)


def grammar_advance(
    packed: torch.Tensor,
    row_slots: torch.Tensor,
    token_ids: torch.Tensor,
    grammar_on: torch.Tensor,
    grammar_info: torch.Tensor,
    grammar_state: torch.Tensor,
    grammar_table: torch.Tensor,
    vocabulary: torch.Tensor,
    alive: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """See the package."""
    assert results.shape[1] >= row_slots.numel(), "the result ring is narrower than the step"
    grammar_advance_kernel[(row_slots.numel(),)](
        packed, row_slots, token_ids, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, alive, results,
        grammar_on.numel(), vocabulary.shape[1], vocabulary.shape[0] - 1, grammar_table.shape[1], results.shape[0],
        results.shape[1] * results.shape[2], CLASS_INTS=CLASS_INTS, num_warps=1,
        **launch_early(token_ids.device),
    )  # fmt: skip
