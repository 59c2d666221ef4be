"""Structured output: the device follows each request's automaton by itself, so the host may run ahead as ever."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headway.core.automaton import CLASS_INTS, MAX_TABLE_INTS, MAX_TOKEN_BYTES, Vocabulary
from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.plan import Int32s
from headway.kernels.grammar_advance import grammar_advance
from headway.kernels.grammar_mask import grammar_mask, kept_ints
from headway.sampling.feature import SlotEdit, Tables, ints
from headway.state.slots import Table

WORDS = MAX_TOKEN_BYTES // 4
MAX_SERIAL = 2**31 - 1


class Grammar:
    """Forbids tokens that the request's automaton cannot read, and moves it by the sampled one.

    Each slot has room for an automaton, so there is nothing to share, count or evict: it comes with the admission and goes
    with the next one.

    Attributes:
        vocabulary: int32 [WORDS + 1, V], the bytes of every token (see ``grammar_mask``); zeros until ``learn``.
    """

    def __init__(self, at: Tables) -> None:
        view = at.arena.view
        self._on, self._info, self._state = view("grammar_on"), view("grammar_info"), view("grammar_state")
        self._table = view("grammar_table")
        self._stop_counts, self._stop_ids = view("stop_counts"), view("stop_ids")
        self._serial, self._kept = view("grammar_serial"), view("grammar_kept")
        self._num_staged = 0
        self.vocabulary = torch.zeros(WORDS + 1, at.vocab_size, dtype=torch.int32, device=at.arena.ints.device)
        self._tokens: list[bytes] | None = None

    @staticmethod
    def tables(vocab_size: int) -> list[Table]:
        """Slot tables of the feature."""
        singles = [Table("grammar_on"), Table("grammar_state"), Table("grammar_serial")]
        kept = Table("grammar_kept", kept_ints(vocab_size))
        return [*singles, Table("grammar_info", 3), Table("grammar_table", MAX_TABLE_INTS), kept]

    @property
    def knows_tokens(self) -> bool:
        """Whether ``learn`` was called."""
        return self._tokens is not None

    def learn(self, vocabulary: Vocabulary) -> Int32s:
        """Remember the tokens; returns what ``self.vocabulary`` must hold, flat. Ids beyond the model's are dropped."""
        size = self.vocabulary.shape[1]
        self._tokens = vocabulary.tokens[:size]
        places: Int32s = np.zeros((WORDS + 1, size), np.int32)
        data = np.zeros((size, MAX_TOKEN_BYTES), np.uint8)
        for token, text in enumerate(self._tokens):
            if 0 < len(text) <= MAX_TOKEN_BYTES:
                data[token, : len(text)] = np.frombuffer(text, np.uint8)
                places[WORDS, token] = len(text)
        places[:WORDS] = data.view(np.int32).T
        return places.reshape(-1)

    def wanted(self, request: AddRequest) -> bool:
        """Whether the request has a grammar."""
        return request.automaton is not None

    def stage(self, request: AddRequest) -> list[SlotEdit]:
        """The flag, the numbers, and the automaton. Raises InvalidRequestError when it is malformed."""
        automaton = request.automaton
        if automaton is None:
            return [SlotEdit("grammar_on", ints(0))]
        if self._tokens is None:
            raise InvalidRequestError(
                "structured_outputs need the vocabulary's bytes, and the engine was never told them",
                "structured_outputs",
            )
        automaton.check()
        num_states = automaton.num_states
        size = num_states * automaton.num_classes
        table = np.zeros(CLASS_INTS + (size + num_states + 1) // 2, np.int32)
        table[:CLASS_INTS] = np.frombuffer(automaton.classes, np.uint8)
        behind = table[CLASS_INTS:].view(np.uint16)
        behind[:size] = np.frombuffer(automaton.transitions, np.uint16)
        behind[size : size + num_states] = np.frombuffer(automaton.kinds, np.uint16)
        self._num_staged = self._num_staged % MAX_SERIAL + 1
        return [
            SlotEdit("grammar_on", ints(1)),
            SlotEdit("grammar_serial", ints(self._num_staged)),
            SlotEdit("grammar_info", ints(automaton.num_states, automaton.num_classes, automaton.first_accepting)),
            SlotEdit("grammar_table", table),
        ]

    def restart(self, request: AddRequest, generated: Int32s) -> list[SlotEdit]:
        """The state after the tokens that a request had generated when it was preempted; the first state without any."""
        automaton, tokens = request.automaton, self._tokens
        if automaton is None or tokens is None:
            return []
        state = automaton.start
        for token in generated.tolist():  # host: the scheduler's numbers
            state = automaton.walk(state, tokens[token])
        return [SlotEdit("grammar_state", ints(state))]

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """logits[n, t] = -inf where the automaton cannot read t."""
        grammar_mask(
            logits,
            slots,
            self._on,
            self._info,
            self._state,
            self._table,
            self.vocabulary,
            self._stop_counts,
            self._stop_ids,
            self._serial,
            self._kept,
        )

    def advance(self, step_and_tables: Sequence[torch.Tensor], results: Sequence[object]) -> None:
        """What ``slot_advance`` does with its arguments, and move the automata by the sampled tokens.

        Args:
            results: the ring of results and, of rows of drafts, the arguments behind it.
        """
        grammar_advance(
            *step_and_tables,
            self._on,
            self._info,
            self._state,
            self._table,
            self.vocabulary,
            *results,
        )
