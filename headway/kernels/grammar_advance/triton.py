"""``grammar_advance`` in Triton: one program per row, one byte after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.automaton import CLASS_INTS
from headway.kernels.grammar_mask.triton import next_state

NONE, EOS, LENGTH, NO_TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3), tl.constexpr(4)
"""core.plan.Finish."""


@triton.jit
def grammar_advance_kernel(
    packed, row_slots, token_ids, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, alive, results,
    num_slots, vocab, num_words, table_ints, ring_size, ring_stride, CLASS_INTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(row_slots + row).to(tl.int64)
    ring = tl.load(packed + 5).to(tl.int64)
    known = (slot >= 0) & (slot < num_slots) & (ring >= 0) & (ring < ring_size)
    if tl.load(grammar_on + slot, mask=known, other=0) != 0:
        result = results + ring * ring_stride + 4 * row
        finish = tl.load(result + 2)
        if tl.load(result) != 0:
            num_states = tl.load(grammar_info + 3 * slot)
            num_classes = tl.load(grammar_info + 3 * slot + 1)
            state = tl.load(grammar_state + slot)
            state = tl.where((state > 0) & (state < num_states), state, 0)
            broken = (finish == EOS) & (state < tl.maximum(tl.load(grammar_info + 3 * slot + 2), 1))
            if (finish == NONE) | (finish == LENGTH):
                token = tl.load(token_ids + row)
                real = (token >= 0) & (token < vocab)
                length = tl.load(vocabulary + num_words.to(tl.int64) * vocab + token, mask=real, other=0)
                state = tl.where(length > 0, state, 0)
                table = grammar_table + slot * table_ints
                i = tl.zeros_like(length)
                while (i < tl.minimum(length, 4 * num_words)) & (state != 0):
                    four = tl.load(vocabulary + (i // 4) * vocab + token)
                    byte = (four >> (8 * (i % 4))) & 255
                    state = next_state(table, state, byte, True, num_states, num_classes, table_ints, CLASS_INTS)
                    i += 1
                tl.store(grammar_state + slot, state)
                broken = state == 0
            if broken:
                tl.store(result + 2, NO_TOKEN)
                tl.store(alive + slot, 0)


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
    )  # fmt: skip
