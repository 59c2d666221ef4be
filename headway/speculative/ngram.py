"""The n-gram drafter: text repeats itself, so what followed the last tokens before may follow them again."""

from __future__ import annotations

from headway.kernels.ngram_draft import ngram_draft
from headway.speculative.base import Drafter
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena


class NgramDrafter(Drafter):
    """Looks the last tokens of each slot up in the slot's own history.

    Args:
        arena: has the core tables with ``number`` drafts.
        number: drafts a row.
        min_n, max_n: tokens that must, and that at most need, be equal.
    """

    def __init__(self, arena: SlotArena, number: int, min_n: int, max_n: int) -> None:
        self._drafts = arena.view("drafts").view(arena.num_slots, number)
        self._history, self._num_tokens = arena.view("history"), arena.view("num_tokens")
        self._min_n, self._max_n = min_n, max_n

    def propose(self, batch: StepBatch, flags: int) -> None:
        """Searches each row's known tokens."""
        if batch.width > 1:
            ngram_draft(self._drafts, batch.row_slots, self._history, self._num_tokens, self._min_n, self._max_n)
