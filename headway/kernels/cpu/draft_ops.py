"""Native implementations of the operations that guess tokens; shapes and meaning in each operation's package."""

from __future__ import annotations

import torch

from headway.kernels.cpu.ops import available, native
from headway.kernels.cpu.step_ops import are_plain
from headway.kernels.registry import OPS

__all__ = ["available", "ngram_draft"]


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
