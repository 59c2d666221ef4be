"""What every pooler looks like."""

from __future__ import annotations

from typing import Protocol

import torch

from headway.state.batch import StepBatch


class Pooler(Protocol):
    """Takes a vector for each row, or each token, out of a step's hidden states. Runs on the device, in every step; only the
    vectors of rows that end their texts, and of tokens, are used.

    A text may come in several steps (chunks), and a preempted one comes again from its start. What has to be kept between
    chunks belongs into slot tables of the pooler's own; a row begins a text where its first token has position 0. Rows of
    ended requests and of padding (seq_lens 0) write nothing.

    Attributes:
        width: numbers of a row's vector; 0: rows have none.
        token_width: numbers of a token's vector; 0: tokens have none.
        wants_all: needs the hidden states of all tokens, not only of each row's last; then no prefix is taken from the cache.
    """

    width: int
    token_width: int
    wants_all: bool

    def __call__(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """f32 [R, width] from hidden states after the final norm: [T, H] with ``wants_all``, else [R, H]."""

    def tokens(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """f32 [T, token_width] from [T, H]; only where ``token_width`` is not 0."""
