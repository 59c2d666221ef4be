"""Native implementations of the grammar operations; shapes and meaning in each operation's package."""

from __future__ import annotations

import torch

from headway.kernels.cpu.ops import available, native
from headway.kernels.cpu.step_ops import HEADER, RECORD_INTS, are_plain, slot_advance
from headway.kernels.registry import OPS

__all__ = ["available", "grammar_advance", "grammar_mask"]


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
    grammar_serial: torch.Tensor,
    grammar_kept: torch.Tensor,
) -> None:
    ints = (slots, grammar_on, grammar_info, grammar_state, grammar_table, vocabulary, stop_counts, stop_ids)
    editable = logits.dtype in (torch.float32, torch.bfloat16) and logits.dim() == 2 and logits.stride(1) == 1
    if not editable or not are_plain(torch.int32, *ints) or vocabulary.shape[1] != logits.shape[1]:
        OPS["grammar_mask"].reference(logits, *ints, grammar_serial, grammar_kept)
        return
    num_slots = grammar_on.numel()
    native().headway_grammar_mask(
        logits.data_ptr(), *[table.data_ptr() for table in ints], slots.numel(), logits.stride(0), logits.shape[1],
        num_slots, grammar_table.shape[1], vocabulary.shape[0] - 1, stop_ids.numel() // num_slots,
        logits.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip


def grammar_advance(
    packed: torch.Tensor,
    row_slots: torch.Tensor,
    token_ids: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    min_total: torch.Tensor,
    max_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
    grammar_on: torch.Tensor,
    grammar_info: torch.Tensor,
    grammar_state: torch.Tensor,
    grammar_table: torch.Tensor,
    vocabulary: torch.Tensor,
    results: torch.Tensor,
    drafts: torch.Tensor | None = None,
    next_slots: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    step = (packed, row_slots, token_ids)
    tables = (history, num_tokens, num_computed, alive, counts, count_on, min_total, max_total, stop_counts, stop_ids)
    grammars = (grammar_on, grammar_info, grammar_state, grammar_table, vocabulary)
    plain = are_plain(torch.int32, *step, *grammars, alive, results, *([] if next_slots is None else [next_slots]))
    if results.shape[2] < RECORD_INTS + offset or not plain or packed.numel() < HEADER:
        OPS["grammar_advance"].reference(*step, *tables, *grammars, results, drafts, next_slots, offset)
        return
    slot_advance(*step, *tables, results, drafts, next_slots, offset)
    native().headway_grammar_advance(
        *[table.data_ptr() for table in (*step, *grammars, alive, results)],
        None if next_slots is None else next_slots.data_ptr(), row_slots.numel(), grammar_on.numel(),
        vocabulary.shape[1], grammar_table.shape[1], vocabulary.shape[0] - 1, *results.shape, offset,
    )  # fmt: skip
