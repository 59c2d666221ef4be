"""Drafts on stages that draw nothing: the drafter is on the last stage, and what it guesses comes back with the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.core.cache import CacheLayout
from headway.models.interface import ModelSpec
from headway.speculative.base import Drafter
from headway.state.batch import StepBatch


@dataclass(frozen=True, slots=True)
class FarModel:
    """A drafter's model that is on the last stage: nothing of it is here.

    Attributes:
        spec: of the target, caching nothing.
        auxiliary: layers of the target that it reads, rising: their outputs are handed on with the hidden states.
    """

    spec: ModelSpec
    auxiliary: tuple[int, ...]

    @classmethod
    def of(cls, target: ModelSpec, auxiliary: tuple[int, ...]) -> FarModel:
        """One that reads ``auxiliary`` of ``target``."""
        return cls(replace(target, cache=CacheLayout((), (), ())), auxiliary)


class ToldDrafter(Drafter):
    """Guesses nothing: ``runner.relay`` fills the draft table with what it is told.

    Args:
        auxiliary: see ``FarModel``.
    """

    def __init__(self, auxiliary: tuple[int, ...] = ()) -> None:
        self.auxiliary = auxiliary

    def propose(self, batch: StepBatch, flags: int) -> None:
        """There is nothing to do."""
