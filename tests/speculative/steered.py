"""A drafter with a model whose guesses are replaced: by the answers, right or wrong as a pattern says. Tests only.

Heads of random weights are nearly never right, so that alone they would not see several of their drafts accepted.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.core.errors import ConfigError
from headway.core.speculative import SpeculativeConfig
from headway.engine.drafts import Drafts
from headway.models.interface import Forward
from headway.speculative.base import Drafter, DraftHouse
from headway.state.batch import StepBatch


class Steered(Drafter):
    """Lets ``inner`` guess, keeps what it says, and lets ``forced`` write over it.

    Attributes:
        said: int32 [S, K], the inner drafter's drafts.
    """

    def __init__(self, house: DraftHouse, inner: Drafter, forced: Drafter) -> None:
        self._inner, self._forced = inner, forced
        self.auxiliary, self.reads_hidden = inner.auxiliary, inner.reads_hidden
        self._drafts = house.arena.view("drafts").view(house.arena.num_slots, house.number)
        self.said = torch.zeros_like(self._drafts)

    def observe(self, batch: StepBatch, forward: Forward) -> None:
        """See ``Drafter``."""
        self._inner.observe(batch, forward)

    def propose(self, batch: StepBatch, flags: int) -> None:
        """See ``Drafter``."""
        self._inner.propose(batch, flags)
        self.said.copy_(self._drafts)
        self._forced.propose(batch, flags)


def steered(config: dict[str, object], by: Drafts, made: list[Steered]) -> Drafts:
    """The drafts of ``config``, replaced by those of ``by``; the drafter is put into ``made``."""
    real = Drafts.of(SpeculativeConfig(**config))  # type: ignore[arg-type]
    if real is None or real.number != by.number:
        raise ConfigError("as many drafts as those that replace them")

    def make(house: DraftHouse) -> Drafter:
        made.append(Steered(house, real.drafter(house), by.drafter(house)))
        return made[-1]

    return replace(real, drafter=make)
