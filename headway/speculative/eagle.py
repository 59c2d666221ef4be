"""The drafter of EAGLE heads and of layers for multi-token prediction: over the target's hidden states, chained K times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch

from headway.kernels.masked_write import gather_rows
from headway.models.interface import Forward
from headway.sampling.sampler import Judge
from headway.speculative.base import Drafter, DraftHouse, DraftModel
from headway.speculative.chain import Chain
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


class HiddenHead(DraftModel, Protocol):
    """A head over hidden states: ``EagleModel``, ``MTPModel``."""

    dtype: torch.dtype

    @property
    def auxiliary(self) -> tuple[int, ...]:
        """Layers of the target whose output it reads, rising; (): it reads the last hidden states."""

    def combine(self, states: Iterable[torch.Tensor]) -> torch.Tensor:
        """What of the target's states [T, C] goes in: [T, C of the head]."""

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, batch: StepBatch, caches: CachePool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass, see ``EagleModel.forward``."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V] over the target's vocabulary."""


class EagleDrafter(Drafter):
    """Reads each step's tokens a place ahead: the hidden state of a token with the token behind it.

    The keys it writes for a token depend on the token behind, so the last block of a prefix that is found in the cache is
    computed once more (``SchedulerConfig.forgets_last_hit``). Between chunks the token behind is the prompt's next one, which
    the slot's history has.
    """

    def __init__(self, house: DraftHouse) -> None:
        model = self._model = cast(HiddenHead, house.model)
        self.auxiliary, self.reads_hidden = model.auxiliary, not model.auxiliary
        view, device = house.arena.view, house.arena.ints.device
        self._history, self._num_tokens = view("history"), view("num_tokens")
        self._num_computed = view("num_computed")
        self._chain = Chain(house, model.spec.cache, -2)
        size, dtype = model.spec.hidden_size, model.dtype
        # The halves of a step are graphs of their own: what passes between them has a place of its own.
        self._hidden = torch.zeros(house.max_tokens, size, dtype=dtype, device=device)

    def observe(self, batch: StepBatch, forward: Forward) -> None:
        """Keep what the head reads of the target's states."""
        states = forward.auxiliary or (forward.hidden,)
        self._hidden[: len(batch.input_ids)].copy_(self._model.combine(states))

    def judge(self, batch: StepBatch, slots: torch.Tensor, offset: int, flags: int) -> Judge | None:
        """By the distributions, where drafts are drawn from theirs."""
        rejection = self._chain.rejection
        return None if rejection is None else rejection.judge(batch, slots, offset, flags)

    def propose(self, batch: StepBatch, flags: int) -> None:
        """A pass over the step's own tokens, which draws the first draft, and one of a token a row for each further one."""
        model, chain, slots = self._model, self._chain, batch.row_slots
        hidden = self._hidden[: len(batch.input_ids)]
        out, carried = model.forward(self._following(batch), hidden, chain.whole(batch), chain.caches)
        if batch.width == 1:
            return
        last = self._last_places(batch)
        out, carried = out.index_select(0, last), carried.index_select(0, last)
        tokens = chain.draw(model.logits(out), slots, 0, flags)
        number = batch.width - 1  # of the next step, if it is like this one
        for link in range(1, number):
            step = chain.link(batch, tokens, link)
            out, carried = model.forward(step.input_ids, carried, step, chain.caches)
            tokens = chain.draw(model.logits(out), slots, link, flags)
        chain.link(batch, tokens, number)

    def _following(self, batch: StepBatch) -> torch.Tensor:
        """int32 [T], the token behind each token of the step; 0 where that is not known: behind rejected drafts."""
        place = torch.arange(len(batch.input_ids), dtype=torch.int32, device=batch.input_ids.device)
        row = torch.searchsorted(batch.query_start, place, right=True) - 1
        slot = batch.row_slots.index_select(0, row.clamp_(0, len(batch.row_slots) - 1)).clamp(min=0)
        behind = batch.positions + 1
        known = behind < self._num_tokens.index_select(0, slot)
        return torch.where(known, gather_rows(self._history, slot, behind), 0)

    def _last_places(self, batch: StepBatch) -> torch.Tensor:
        """int32 [R], where in the step each row's last accepted token is."""
        most = len(batch.input_ids) - 1
        first = batch.query_start[:-1].clamp(max=most)
        start = batch.positions.index_select(0, first)
        computed = self._num_computed.index_select(0, batch.row_slots.clamp(min=0))
        return (first + computed - 1 - start).clamp_(0, most)
