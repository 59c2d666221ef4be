"""A drafter with a model of its own on several ranks, each of which has all of it.

All ranks compute the same drafts from the same hidden states, but nobody promises that the last bits are the same: cards
that differ choose other tiles. Ranks that verify different drafts would go different ways, so all of them take the first
one's, which costs one exchange a step of a few bytes a row.
"""

from __future__ import annotations

import torch

from headway.models.interface import Forward, Model
from headway.parallel.group import Group
from headway.sampling.sampler import Judge
from headway.sampling.spread import SpreadLogits
from headway.speculative.base import Drafter
from headway.speculative.draft_vocabulary import Rows
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena


class AgreedDrafter(Drafter):
    """Guesses and judges as another drafter does on the first rank.

    Args:
        arena: has the core tables with ``number`` drafts.
        number: drafts a row.
        inner: makes the guesses.
        group: ranks that share the layers.
    """

    def __init__(self, arena: SlotArena, number: int, inner: Drafter, group: Group) -> None:
        self._drafts, self._inner, self._group = arena.view("drafts").view(arena.num_slots, number), inner, group
        self.auxiliary, self.reads_hidden = inner.auxiliary, inner.reads_hidden

    def observe(self, batch: StepBatch, forward: Forward) -> None:
        """As the inner drafter does."""
        self._inner.observe(batch, forward)

    def propose(self, batch: StepBatch, flags: int) -> None:
        """The first rank's drafts, of all slots: they are alike where the step has none."""
        self._inner.propose(batch, flags)
        if batch.width > 1:
            self._agree(self._drafts)

    def judge(self, batch: StepBatch, slots: torch.Tensor, offset: int, flags: int) -> Judge | None:
        """By the first rank's distributions."""
        inner = self._inner.judge(batch, slots, offset, flags)
        if inner is None:
            return None

        def judge(token_ids: torch.Tensor, logits: torch.Tensor) -> None:
            inner(token_ids, logits)
            self._agree(token_ids)

        return judge

    def _agree(self, x: torch.Tensor) -> None:
        x.copy_(self._group.all_gather(x)[0])


def whole_logits(target: Model) -> Rows:
    """[N, C] hidden states -> [N, V] by the target's output layer, of which ranks may have a part each."""
    part = target.spec.vocabulary
    if part is None:
        return target.logits
    spread = SpreadLogits(part)
    return lambda hidden: spread.whole(target.logits(hidden))
