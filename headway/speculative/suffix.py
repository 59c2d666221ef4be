"""The suffix drafter: what followed the last tokens in the request's own text, and in answers that others got before."""

from __future__ import annotations

import torch

from headway.kernels.suffix_draft import suffix_draft
from headway.kernels.suffix_keep import suffix_keep
from headway.speculative.base import Drafter
from headway.state.batch import StepBatch
from headway.state.slots import DRAFT_SCOPE, SlotArena

STORE_TOKENS = 2**18
"""Usually kept: 1 MiB, which every row's search reads whole (from the second-level cache, on a GPU)."""


class SuffixDrafter(Drafter):
    """Looks the last tokens of each slot up in its history, and in a ring of the answers of requests that have ended.

    The ring is written by the device at the end of each step, and read at the end of later ones; the host knows nothing of
    it. So what it holds depends on when requests end, and with it the drafts, but not the tokens.

    Args:
        arena: has the core tables with ``number`` drafts.
        number: drafts a row.
        max_match: most tokens that are compared.
        max_answers: most answers that are kept.
        factor, min_prob: see ``suffix_draft``.
        store_tokens: most tokens of answers that are kept.
    """

    def __init__(
        self,
        arena: SlotArena,
        number: int,
        max_match: int,
        max_answers: int,
        factor: float,
        min_prob: float,
        *,
        store_tokens: int = STORE_TOKENS,
    ) -> None:
        view, device = arena.view, arena.ints.device
        self._drafts = view("drafts").view(arena.num_slots, number)
        self._scope, self._history, self._num_tokens = view(DRAFT_SCOPE), view("history"), view("num_tokens")
        self._ends = view("alive"), self._history, view("prompt_len"), self._num_tokens
        self._keeps = max_answers > 0
        size = min(store_tokens, max(max_answers, 1) * 2 * (self._history.shape[1] + 1))
        self._store = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._cursor = torch.zeros(2 + max(max_answers, 1), dtype=torch.int64, device=device)
        self._rule = max_match, factor, min_prob

    def propose(self, batch: StepBatch, flags: int) -> None:
        """Keeps the answers of rows that ended in this step; then searches each row's known tokens."""
        if self._keeps:
            suffix_keep(self._store, self._cursor, batch.row_slots, batch.seq_lens, self._scope, *self._ends)
        if batch.width > 1:
            known = self._history, self._num_tokens
            suffix_draft(self._drafts, batch.row_slots, self._scope, *known, self._store, self._cursor, *self._rule)
