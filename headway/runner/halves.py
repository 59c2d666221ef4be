"""Steps that run as two micro-batches: where they are cut, and how what the halves give becomes the step's.

A step is cut at any token, but one of short rows alone (rows of drafts, mostly) between two rows: kernels for such rows may
read keys and states of earlier tokens before what this very step makes is there. Rows of drafts need not all have as many
tokens, so where the second half's first row begins is known on the device alone: its tokens are gathered, and each half has
room for as many as its rows can have.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from headway.core.ints import cdiv
from headway.models.interface import Forward, Model, Want
from headway.parallel.turns import Turns
from headway.recurrent.base import load_states, save_states
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


class Halves:
    """Forward passes in two halves.

    Args:
        turns: overlaps their exchanges; None: they run one after the other.
    """

    def __init__(self, model: Model, caches: CachePool, turns: Turns | None) -> None:
        self._model, self._caches, self._turns = model, caches, turns

    def forward(self, batch: StepBatch, want: Want) -> Forward:
        """What one pass would give, of all tokens, whatever ``want`` says of the last ones."""
        load_states(batch, self._caches)
        halves, order = cut(batch)
        want = replace(want, last_only=False)
        first, second = [partial(self._model.forward, each, self._caches, want) for each in halves]
        # Kernels that are compiled ahead are looked for on this thread alone.
        overlap = self._turns is not None and want.layers is None
        found = self._turns.run(first, second) if self._turns is not None and overlap else (first(), second())
        save_states(batch, self._caches)

        def whole(*parts: torch.Tensor) -> torch.Tensor:
            both = torch.cat(parts)
            return both if order is None else both.index_select(0, order)

        return Forward(
            whole(*(each.hidden for each in found)),
            tuple(whole(*parts) for parts in zip(*(each.auxiliary for each in found), strict=True)),
        )


def cut(batch: StepBatch) -> tuple[tuple[StepBatch, StepBatch], torch.Tensor | None]:
    """The halves of a step, and where among their tokens, one behind the other, each of the step's lies: int64 [T]; None: they
    lie as they did.

    Replicas that share experts have halves of up to half of what the step may have on any of them; one of them that has nothing
    for the second half runs padding.
    """
    tokens, most = len(batch.input_ids), cdiv(batch.most_tokens, 2)
    if batch.max_query_len > batch.short or (batch.max_query_len == 1 and not batch.most_tokens):
        middle = tokens // 2
        halves = batch.slice(0, middle), batch.slice(middle, tokens)
        return (replace(halves[0], most_tokens=most), replace(halves[1], most_tokens=most)), None
    rows = cdiv(len(batch.row_slots), 2)
    halves = batch.slice_rows(0, rows), batch.slice_rows(rows, len(batch.row_slots))
    token = torch.arange(tokens, device=batch.input_ids.device)
    border, room = batch.query_start[rows : rows + 1], len(halves[0].input_ids)
    order = torch.where(token < border, token, (token - border + room).clamp(max=room + len(halves[1].input_ids) - 1))
    return (replace(halves[0], most_tokens=most), replace(halves[1], most_tokens=most)), order
