"""Native implementations of the sampling operations; shapes and meaning in each operation's package.

Rows of logits may be strided. ``sample`` and ``gather_logprobs`` read float32 and bfloat16 as they are; the edits before
them are made on float32.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.core.params import GREEDY_EPS
from headway.kernels.cpu.ops import available, native
from headway.kernels.cpu.step_ops import are_plain
from headway.kernels.registry import OPS
from headway.kernels.sample.reference import PENALTIES

__all__ = [
    "allowed_tokens",
    "available",
    "bad_words",
    "gather_logprobs",
    "logit_bias",
    "min_tokens",
    "sample",
]


def logit_bias(
    logits: torch.Tensor,
    slots: torch.Tensor,
    bias_counts: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    plain = are_plain(torch.int32, slots, bias_counts, bias_ids) and are_plain(torch.float32, bias_values)
    if not plain or not _are_editable(logits):
        _reference("logit_bias", logits, slots, bias_counts, bias_ids, bias_values)
        return
    num_slots = bias_counts.numel()
    native().headway_logit_bias(
        logits.data_ptr(), slots.data_ptr(), bias_counts.data_ptr(), bias_ids.data_ptr(), bias_values.data_ptr(),
        slots.numel(), logits.stride(0), logits.shape[1], num_slots, bias_ids.numel() // num_slots,
    )  # fmt: skip


def allowed_tokens(
    logits: torch.Tensor, slots: torch.Tensor, allowed_on: torch.Tensor, allowed_bits: torch.Tensor
) -> None:
    num_slots = allowed_on.numel()
    width = allowed_bits.numel() // max(num_slots, 1)
    plain = are_plain(torch.int32, slots, allowed_on, allowed_bits)
    if not plain or not _are_editable(logits) or width * 32 < logits.shape[1]:
        _reference("allowed_tokens", logits, slots, allowed_on, allowed_bits)
        return
    native().headway_allowed_tokens(
        logits.data_ptr(), slots.data_ptr(), allowed_on.data_ptr(), allowed_bits.data_ptr(), slots.numel(),
        logits.stride(0), logits.shape[1], num_slots, width, torch.get_num_threads(),
    )  # fmt: skip


def min_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    min_total: torch.Tensor,
    stop_counts: torch.Tensor,
    stop_ids: torch.Tensor,
) -> None:
    tables = (slots, num_tokens, min_total, stop_counts, stop_ids)
    if not are_plain(torch.int32, *tables) or not _are_editable(logits):
        _reference("min_tokens", logits, *tables)
        return
    num_slots = num_tokens.numel()
    native().headway_min_tokens(
        logits.data_ptr(), *[table.data_ptr() for table in tables], slots.numel(), logits.stride(0), logits.shape[1],
        num_slots, stop_ids.numel() // num_slots,
    )  # fmt: skip


def _penalise(
    logits: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    native().headway_penalties(
        logits.data_ptr(), slots.data_ptr(), counts.data_ptr(), count_on.data_ptr(), repetition.data_ptr(),
        frequency.data_ptr(), presence.data_ptr(), slots.numel(), logits.stride(0), logits.shape[1], count_on.numel(),
        torch.get_num_threads(),
    )  # fmt: skip


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
    tables = (slots, history, num_tokens, prompt_len, bw_counts, bw_offsets, bw_tokens)
    if not are_plain(torch.int32, *tables) or not _are_editable(logits):
        _reference("bad_words", logits, *tables)
        return
    num_slots, length = history.shape
    native().headway_bad_words(
        logits.data_ptr(), *[table.data_ptr() for table in tables], slots.numel(), logits.stride(0), logits.shape[1],
        num_slots, length, bw_offsets.shape[1] - 1, bw_tokens.shape[1],
    )  # fmt: skip


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    num_tokens: torch.Tensor,
    counts: torch.Tensor,
    count_on: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    flags: int,
) -> torch.Tensor:
    reals, ints = (
        (temperature, top_p, min_p, repetition, frequency, presence),
        (slots, top_k, seeds, num_tokens, count_on),
    )
    plain = are_plain(torch.float32, *reals) and are_plain(torch.int32, *ints) and are_plain(torch.int16, counts)
    penalties = (counts, count_on, repetition, frequency, presence)
    if not plain or not _are_readable(logits) or counts.shape[1] != logits.shape[1]:
        drawn: torch.Tensor = _reference(
            "sample", logits, slots, temperature, top_k, top_p, min_p, seeds, num_tokens, *penalties, flags
        )
        return drawn
    if flags & PENALTIES:
        logits = logits.to(torch.float32, copy=True)
        _penalise(logits, slots, *penalties)
    rows, vocab = logits.shape
    out = slots.new_empty(rows)
    failed = native().headway_sample(
        logits.data_ptr(), slots.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), seeds.data_ptr(), num_tokens.data_ptr(), out.data_ptr(), rows, vocab,
        logits.stride(0) * logits.element_size(), temperature.numel(), GREEDY_EPS, flags,
        logits.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("sample: no memory for its candidates")
    return out


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    num_logprobs: torch.Tensor,
    id_counts: torch.Tensor,
    id_table: torch.Tensor,
    max_entries: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ints = (token_ids, slots, num_logprobs, id_counts, id_table)
    if not are_plain(torch.int32, *ints) or not _are_readable(logits):
        gathered: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _reference(
            "gather_logprobs", logits, *ints, max_entries
        )
        return gathered
    (rows, vocab), num_slots = logits.shape, num_logprobs.numel()
    ids = slots.new_empty(rows, 1 + max_entries)
    logprobs = slots.new_empty(rows, 1 + max_entries, dtype=torch.float32)
    ranks, counts = slots.new_empty(rows), slots.new_empty(rows)
    failed = native().headway_gather_logprobs(
        logits.data_ptr(), *[tensor.data_ptr() for tensor in (*ints, ids, logprobs, ranks, counts)], rows, vocab,
        logits.stride(0) * logits.element_size(), num_slots, id_table.numel() // num_slots, max_entries,
        logits.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("gather_logprobs: no memory for its candidates")
    return ids, logprobs, ranks, counts


def _are_editable(logits: torch.Tensor) -> bool:
    """Whether the kernels can edit ``logits``: float32, elements of a row next to each other."""
    return logits.dtype is torch.float32 and logits.dim() == 2 and logits.stride(1) == 1


def _are_readable(logits: torch.Tensor) -> bool:
    """Whether the kernels can read ``logits``: also bfloat16, and at least one element a row."""
    known = logits.dtype is torch.float32 or logits.dtype is torch.bfloat16
    return known and logits.dim() == 2 and logits.stride(1) == 1 and logits.shape[1] > 0


def _reference(name: str, *args: Any) -> Any:
    return OPS[name].reference(*args)
