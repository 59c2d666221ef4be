"""Native implementations of the step operations; shapes and meaning in each operation's package.

They do work for what the step holds, where the references, made to read nothing on the host, do it for every place that
could hold something.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.kernels.cpu.ops import available, native
from headway.kernels.registry import OPS

__all__ = ["apply_edits", "available", "count_tokens", "slot_advance", "step_unpack"]

RECORD_INTS = 4
"""Of a row of one outcome; each further one takes another."""
HEADER = 6
"""Numbers at the start of a packed step that the kernels read unchecked."""


def are_plain(dtype: torch.dtype, *tensors: torch.Tensor) -> bool:
    """Whether all have this dtype and are contiguous."""
    return all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _row(table: torch.Tensor | None, num_slots: int) -> int:
    """Columns of a table that may be missing."""
    return 0 if table is None else table.numel() // max(num_slots, 1)


def apply_edits(arena: torch.Tensor, packed: torch.Tensor, max_edits: int) -> None:
    if not are_plain(torch.int32, arena, packed) or packed.numel() < HEADER:
        _reference("apply_edits", arena, packed, max_edits)
        return
    native().headway_apply_edits(arena.data_ptr(), packed.data_ptr(), arena.numel(), packed.numel(), max_edits)


def step_unpack(
    packed: torch.Tensor,
    history: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    block_tables: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    row_slots: torch.Tensor,
    logit_indices: torch.Tensor,
    block_size: int,
    max_query_len: int,
    num_tokens: torch.Tensor | None = None,
    drafts: torch.Tensor | None = None,
) -> None:
    tensors = (
        packed, history, num_computed, alive, block_tables, input_ids, positions, kv_slots, query_start, seq_lens,
        row_slots, logit_indices,
    )  # fmt: skip
    groups = [(block_tables, kv_slots)]
    if kv_slots.dim() > 1:
        groups = list(zip(block_tables.unbind(), kv_slots.unbind(), strict=True))
    plain = tensors[:4] + tensors[5:7] + tensors[8:] + tuple(tensor for group in groups for tensor in group)
    plain += () if drafts is None or num_tokens is None else (num_tokens, drafts)
    if (drafts is None) != (num_tokens is None) or not are_plain(torch.int32, *plain) or packed.numel() < HEADER:
        _reference("step_unpack", *tensors, block_size, max_query_len, num_tokens, drafts)
        return
    num_slots, length = history.shape
    for tables, written in groups:  # what is no group's own is written by each, alike
        pointers = [tensor.data_ptr() for tensor in (*tensors[:4], tables, *tensors[5:7], written, *tensors[8:])]
        native().headway_step_unpack(
            *pointers, _pointer(num_tokens), _pointer(drafts), packed.numel(), num_slots, length,
            tables.numel() // num_slots, input_ids.numel(), seq_lens.numel(), block_size,
            logit_indices.numel() // max(seq_lens.numel(), 1), _row(drafts, num_slots),
        )  # fmt: skip


def slot_advance(
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
    results: torch.Tensor,
    drafts: torch.Tensor | None = None,
    next_slots: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    before = (packed, row_slots, token_ids, history, num_tokens, num_computed, alive)
    after = (count_on, min_total, max_total, stop_counts, stop_ids, results)
    rows, (ring_size, ring_rows, record_ints) = row_slots.numel(), results.shape
    runs = () if drafts is None or next_slots is None else (drafts, next_slots)
    plain = are_plain(torch.int32, *before, *after, *runs) and are_plain(torch.int16, counts)
    room = record_ints >= RECORD_INTS + offset and (drafts is None) == (next_slots is None)
    if not room or not plain or packed.numel() < HEADER or ring_rows < rows:
        _reference("slot_advance", *before, counts, *after, drafts, next_slots, offset)
        return
    num_slots, length = history.shape
    native().headway_slot_advance(
        *[tensor.data_ptr() for tensor in (*before, counts, *after)], _pointer(drafts), _pointer(next_slots),
        packed.numel(), rows, num_slots, length, counts.shape[1], stop_ids.numel() // num_slots, ring_size, ring_rows,
        record_ints, _row(drafts, num_slots), offset,
    )  # fmt: skip


def count_tokens(
    counts: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
    max_tokens_bound: int,
) -> None:
    if not are_plain(torch.int32, slots, history, prompt_len, num_tokens) or not are_plain(torch.int16, counts):
        _reference("count_tokens", counts, slots, history, prompt_len, num_tokens, max_tokens_bound)
        return
    (num_slots, vocab), length = counts.shape, history.shape[1]
    native().headway_count_tokens(
        counts.data_ptr(), slots.data_ptr(), history.data_ptr(), prompt_len.data_ptr(), num_tokens.data_ptr(),
        slots.numel(), num_slots, vocab, length, max(1, min(max_tokens_bound, length)),
    )  # fmt: skip


def _reference(name: str, *args: Any) -> None:
    OPS[name].reference(*args)
