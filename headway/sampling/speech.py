"""The rules that transcripts obey: suppressed tokens, and timestamps in order."""

from __future__ import annotations

from typing import Final

import torch

from headway.core.errors import InvalidRequestError
from headway.core.hearing import MAX_SUPPRESSED
from headway.core.messages import AddRequest
from headway.kernels.speech_rules import speech_rules
from headway.sampling.feature import SlotEdit, Tables, ints
from headway.state.slots import Table

NUMBERS: Final = "speech_numbers"


class Speech:
    """Of models that hear. Tables: see ``kernels.speech_rules``."""

    def __init__(self, at: Tables) -> None:
        view = at.arena.view
        self._numbers, self._ids = view(NUMBERS), view("speech_ids")
        self._history, self._num_tokens, self._prompt_len = view("history"), view("num_tokens"), view("prompt_len")

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Slot tables of the feature."""
        return [Table(NUMBERS, 6), Table("speech_ids", MAX_SUPPRESSED)]

    def wanted(self, request: AddRequest) -> bool:
        """Whether the request is for a transcript."""
        return request.speech is not None

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """Numbers and ids. Raises InvalidRequestError when there are too many ids."""
        rules = request.speech
        if rules is None:
            return [SlotEdit(NUMBERS, ints(0))]
        ids = [*rules.suppress, *rules.begin_suppress]
        if len(ids) > MAX_SUPPRESSED:
            raise InvalidRequestError(f"{len(ids)} suppressed tokens; at most {MAX_SUPPRESSED} are possible", "speech")
        counts = (len(rules.suppress), len(ids))
        edits = [SlotEdit(NUMBERS, ints(1, *counts, rules.first_timestamp, rules.end, rules.max_initial))]
        return [*edits, SlotEdit("speech_ids", ints(*ids))] if ids else edits

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """What may not be drawn becomes -inf."""
        speech_rules(logits, slots, self._history, self._num_tokens, self._prompt_len, self._numbers, self._ids)
