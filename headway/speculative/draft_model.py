"""A smaller model of the same vocabulary guesses what the target will say."""

from __future__ import annotations

from typing import cast

import torch

from headway.core.errors import ConfigError
from headway.models.interface import ALL_TOKENS, Model
from headway.sampling.sampler import Judge
from headway.speculative.base import Drafter, DraftHouse
from headway.speculative.chain import Chain
from headway.state.batch import StepBatch


class ModelDrafter(Drafter):
    """Reads each step's tokens like the target does, then goes on for K tokens by itself.

    Rejected drafts leave keys behind; they are overwritten before anybody reads them, as the target's are.

    Raises:
        ConfigError: the vocabularies differ, or see ``chain.shared_group``.
    """

    def __init__(self, house: DraftHouse) -> None:
        assert house.model is not None
        self._model = cast(Model, house.model)
        sizes = house.model.spec.vocab_size, house.target.spec.vocab_size
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"speculative_config: the draft model has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}; "
                "take a draft model of the same family"
            )
        self._chain = Chain(house, house.model.spec.cache, -1)
        self._nothing = torch.zeros(house.max_rows, dtype=torch.int32, device=house.arena.ints.device)

    def judge(self, batch: StepBatch, slots: torch.Tensor, offset: int, flags: int) -> Judge | None:
        """By the distributions, where drafts are drawn from theirs."""
        rejection = self._chain.rejection
        return None if rejection is None else rejection.judge(batch, slots, offset, flags)

    def propose(self, batch: StepBatch, flags: int) -> None:
        """A pass of a token a row for each draft, behind one over the step's own tokens that fills the cache."""
        model, chain, slots = self._model, self._chain, batch.row_slots
        model.forward(chain.whole(batch), chain.caches, ALL_TOKENS)
        if batch.width == 1:
            return
        tokens = self._nothing[: len(slots)]
        number = batch.width - 1  # of the next step, if it is like this one
        for link in range(number):
            step = chain.link(batch, tokens, link)
            logits = model.logits(model.forward(step, chain.caches, ALL_TOKENS).hidden)
            tokens = chain.draw(logits, slots, link, flags)
        chain.link(batch, tokens, number)
