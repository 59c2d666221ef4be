"""Drafts that are right as often as a benchmark wants them to be. What comes out is no text."""

from __future__ import annotations

import torch

from headway.kernels.synthetic_accept import synthetic_accept
from headway.models.interface import Forward
from headway.sampling.sampler import Judge
from headway.speculative.base import Drafter
from headway.state.batch import StepBatch
from headway.state.slots import SlotArena


class SyntheticDrafter(Drafter):
    """Guesses with another drafter, and accepts by a rate instead of the model's tokens.

    Args:
        arena: has the core tables with ``number`` drafts, and the sampler's.
        inner: makes the guesses.
        length: mean of the tokens that a row brings, 1 to ``number`` + 1. The first drafts are always right and one is at
            times, so that lengths vary least.
        vocab_size: V.
    """

    def __init__(self, arena: SlotArena, number: int, inner: Drafter, length: float, vocab_size: int) -> None:
        self._drafts = arena.view("drafts").view(arena.num_slots, number)
        self._num_tokens, self._seeds = arena.view("num_tokens"), arena.view("seeds")
        self._inner, self._vocab_size = inner, vocab_size
        self.auxiliary, self.reads_hidden = inner.auxiliary, inner.reads_hidden
        self._always = int(length - 1)
        self._part = round((length - 1 - self._always) * 2**24)

    def observe(self, batch: StepBatch, forward: Forward) -> None:
        """As the inner drafter does."""
        self._inner.observe(batch, forward)

    def propose(self, batch: StepBatch, flags: int) -> None:
        """As the inner drafter does."""
        self._inner.propose(batch, flags)

    def judge(self, batch: StepBatch, slots: torch.Tensor, offset: int, flags: int) -> Judge:
        """Makes the tokens the drafts, or something else."""

        def judge(token_ids: torch.Tensor, _: torch.Tensor) -> None:
            drafts, known, seeds = self._drafts, self._num_tokens, self._seeds
            synthetic_accept(token_ids, slots, drafts, known, seeds, offset, self._always, self._part, self._vocab_size)

        return judge
