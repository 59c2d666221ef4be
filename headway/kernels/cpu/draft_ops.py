"""Native implementations of the operations that guess tokens; shapes and meaning in each operation's package."""

from __future__ import annotations

import torch

from headway.kernels.cpu.ops import available, native
from headway.kernels.cpu.step_ops import are_plain
from headway.kernels.registry import OPS

__all__ = ["available", "ngram_draft", "suffix_draft", "suffix_keep"]


def ngram_draft(
    drafts: torch.Tensor,
    row_slots: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    min_n: int,
    max_n: int,
) -> None:
    tensors = (drafts, row_slots, history, num_tokens)
    if not are_plain(torch.int32, *tensors):
        OPS["ngram_draft"].reference(*tensors, min_n, max_n)
        return
    (num_slots, length), (_, number) = history.shape, drafts.shape
    native().headway_ngram_draft(
        *[tensor.data_ptr() for tensor in tensors], row_slots.numel(), num_slots, length, number, min_n, max_n
    )


def suffix_draft(
    drafts: torch.Tensor,
    row_slots: torch.Tensor,
    scope: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    store: torch.Tensor,
    cursor: torch.Tensor,
    max_match: int,
    factor: float,
    min_prob: float,
) -> None:
    tensors = (drafts, row_slots, scope, history, num_tokens, store)
    if not (are_plain(torch.int32, *tensors) and are_plain(torch.int64, cursor)):
        OPS["suffix_draft"].reference(*tensors, cursor, max_match, factor, min_prob)
        return
    (num_slots, length), (_, number) = history.shape, drafts.shape
    sizes = (row_slots.numel(), num_slots, length, number, store.numel(), cursor.numel() - 2)
    native().headway_suffix_draft(
        *[tensor.data_ptr() for tensor in (*tensors, cursor)], *sizes, max_match, factor, min_prob
    )


def suffix_keep(
    store: torch.Tensor,
    cursor: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scope: torch.Tensor,
    alive: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    tensors = (row_slots, seq_lens, scope, alive, history, prompt_len, num_tokens)
    if not (are_plain(torch.int32, store, *tensors) and are_plain(torch.int64, cursor)):
        OPS["suffix_keep"].reference(store, cursor, *tensors)
        return
    num_slots, length = history.shape
    native().headway_suffix_keep(
        *[tensor.data_ptr() for tensor in (store, cursor, *tensors)],
        *(row_slots.numel(), num_slots, length, store.numel(), cursor.numel() - 2),
    )
