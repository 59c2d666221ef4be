"""The sampler: the order of logit edits, readable from top to bottom. Penalties are part of the draw, behind them all: of
the edits only biases change a penalised logit, and these come first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.core.plan import Int32s
from headway.parallel.shard import VocabularyPart
from headway.sampling.bad_words import BadWords
from headway.sampling.draw import Draw
from headway.sampling.feature import Feature, SlotEdit, Tables
from headway.sampling.grammar import Grammar
from headway.sampling.logit_edits import AllowedTokens, LogitBias, MinTokens
from headway.sampling.logprobs import NOT_ASKED, Logprobs, LogprobTensors
from headway.sampling.penalties import Penalties
from headway.sampling.speech import NUMBERS, Speech
from headway.sampling.spread import SpreadLogits
from headway.state.slots import SlotArena, Table


@dataclass(frozen=True, slots=True)
class Variant:
    """Which kernels a step needs: decided from host facts only, never from the device.

    Attributes:
        edits: bit i: some row uses feature i of ``Sampler.features``.
        flags: the ``Draw`` paths some row needs.
        max_logprobs: most log-probability entries a row asks for; -1: none.
    """

    edits: int = 0
    flags: int = 0
    max_logprobs: int = NOT_ASKED

    def covers(self, other: Variant) -> bool:
        """Whether a step run as this variant gives all that ``other`` would, and no log-probabilities that nobody asked for.

        Kernels of features that a row does not use leave the row alone, so more of them change nothing.
        """
        more = self.edits | other.edits == self.edits and self.flags | other.flags == self.flags
        asked = other.max_logprobs != NOT_ASKED
        return more and (
            NOT_ASKED != self.max_logprobs >= other.max_logprobs if asked else self.max_logprobs == NOT_ASKED
        )


GREEDY = Variant()
"""Every row takes its largest logit, and no more is asked for."""

BIAS_EDIT, GRAMMAR_EDIT = 1, 1 << 4
"""The bits of ``Variant.edits`` that stand for biases, the only edits that do more than forbid, and for ``Sampler.grammar``."""


ASKS_LOGPROBS = 1 << 30
"""Marks slots that ask for log-probabilities, in the host's mirror of what slots need: bits of edits, above them flags."""


Judge = Callable[[torch.Tensor, torch.Tensor], None]
"""Tokens int32 [N], which it may change in place, and the edited logits [N, V] they were drawn from."""


class Sampled(NamedTuple):
    """token_ids int32 [N], and log-probabilities when the variant asks for them."""

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None


class Sampler:
    """Turns logits into tokens for any mixture of requests.

    Args:
        arena: holds the tables named by ``sampler_tables``.
        vocab_size: columns of the logits.
        part: ranks have the columns of a part of the vocabulary each; None: of all of it.

    Attributes:
        every_edit: ``Variant.edits`` with all features.
    """

    def __init__(self, arena: SlotArena, vocab_size: int, part: VocabularyPart | None = None) -> None:
        self._spread = None if part is None else SpreadLogits(part)
        at = Tables(arena, arena.num_slots, vocab_size)
        self.penalties = Penalties(at)
        self.grammar = Grammar(at)
        self.features: list[Feature] = [
            LogitBias(at),
            AllowedTokens(at),
            MinTokens(at),
            BadWords(at),
            self.grammar,
        ]
        if arena.has(NUMBERS):
            self.features.append(Speech(at))
        self.draw = Draw(at, self.penalties)
        self.logprobs = Logprobs(at)
        self.every_edit = (1 << len(self.features)) - 1
        self._needs = np.zeros(at.num_slots, np.int32)
        self._staged: tuple[SamplingParams | None, list[SlotEdit]] = (None, [])

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """All slot edits that ``request`` needs on admission. Raises InvalidRequestError when it does not fit."""
        seed, params = self.draw.seed(request), request.params
        if (
            request.speech is not None
            or request.automaton is not None
            or request.host_grammar is not None
            or request.bad_words_token_ids
        ):
            return [seed, *self._stage(request)]
        if params is not self._staged[0]:  # many requests come with one and the same
            self._staged = params, self._stage(request)
        return [seed, *self._staged[1]]

    def _stage(self, request: AddRequest) -> list[SlotEdit]:
        """All of them but the seed: they depend on ``params`` alone where there is neither grammar nor bad words."""
        edits = [*self.draw.stage(request), *self.penalties.stage(request), *self.logprobs.stage(request)]
        for feature in self.features:
            edits += feature.stage(request)
        return edits

    def restart(self, request: AddRequest, generated: Int32s) -> list[SlotEdit]:
        """Slot edits that depend on what a resumed request had ``generated`` (int32, empty for a new one)."""
        return self.grammar.restart(request, generated)

    def admit(self, slot: int, request: AddRequest) -> None:
        """Update the host mirrors: ``slot`` now belongs to ``request``."""
        self.logprobs.admit(slot, request)
        edits = sum(feature.wanted(request) << bit for bit, feature in enumerate(self.features))
        flags = self.draw.flags(request) << len(self.features)
        self._needs[slot] = edits | flags | (ASKS_LOGPROBS if self.logprobs.wanted(request) else 0)

    def variant(self, slots: Int32s) -> Variant:
        """What a step over these slots (int32 [R], on the host) needs."""
        needs = int(np.bitwise_or.reduce(self._needs[slots]))
        entries = self.logprobs.max_entries(slots) if needs & ASKS_LOGPROBS else NOT_ASKED
        return Variant(needs & self.every_edit, (needs & ~ASKS_LOGPROBS) >> len(self.features), entries)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] of what the model made, which may be a part of the vocabulary."""
        return logits if self._spread is None else self._spread.whole(logits)

    def __call__(
        self, logits: torch.Tensor, slots: torch.Tensor, variant: Variant, judge: Judge | None = None
    ) -> Sampled:
        """Choose tokens.

        Args:
            logits: [N, V] as the model made them, or those of the rank's part of the vocabulary; modified only when all edits
                forbid tokens and nobody reads them after.
            slots: int32 [N] on the device, -1 on padding.
            judge: has the last word: it may replace the tokens that were drawn, before their log-probabilities are taken.
        """
        if self._spread is not None:
            if variant == GREEDY and judge is None:
                return Sampled(self._spread.best(logits, slots, self.draw), None)
            logits = self._spread.whole(logits)
        edited = logits
        if variant.edits:
            in_place = not variant.edits & BIAS_EDIT and variant.max_logprobs == NOT_ASKED
            edited = logits if in_place else logits.to(torch.float32, copy=True)
            for bit, feature in enumerate(self.features):
                if variant.edits >> bit & 1:
                    feature.apply(edited, slots)
        token_ids = self.draw.apply(edited, slots, variant.flags)
        if judge is not None:
            judge(token_ids, edited)
        if variant.max_logprobs == NOT_ASKED:
            return Sampled(token_ids, None)
        return Sampled(token_ids, self.logprobs.gather(logits, token_ids, slots, variant.max_logprobs))


def sampler_tables(vocab_size: int, *, speech: bool = False) -> list[Table]:
    """The slot tables that a ``Sampler`` needs in its arena; ``speech``: the model hears."""
    owners = (Draw, Logprobs, LogitBias, AllowedTokens, Penalties, BadWords, Grammar)
    found = [table for owner in owners for table in owner.tables(vocab_size)]
    return found + Speech.tables(vocab_size) if speech else found
