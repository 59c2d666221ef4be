"""Structured output at the door: what a request asks for becomes an automaton, or an error that names the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.api.killable import Job
from headway.api.structured.compile import Outcome
from headway.api.structured.compiler import WHERE, GrammarCompiler
from headway.core.automaton import Vocabulary
from headway.core.errors import EngineDeadError, InvalidRequestError
from headway.core.messages import ModelInfo
from headway.core.params import SamplingParams

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer

Teach = Callable[[Vocabulary], None]


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The bytes of the first ``size`` tokens; special and added tokens, and parts of unknown characters, have none."""
    added = tokenizer.added_ids
    tokens = [b"" if token in added else tokenizer.token_bytes(token) for token in range(size)]
    return Vocabulary.of(tokens if tokenizer.has_exact_bytes else [b"" if b"\xef\xbf\xbd" in t else t for t in tokens])


class StructuredDoor:
    """Compiles what requests ask for, and tells the engine the vocabulary before the first one.

    Args:
        teach: hands the vocabulary to the engine.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, teach: Teach) -> None:
        self._info, self._tokenizer, self._teach = info, tokenizer, teach
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._closed = False

    def known(self, params: SamplingParams) -> Outcome | None:
        """What ``prepare`` would use if it is known already. Raises InvalidRequestError as that does."""
        wanted = params.structured_outputs
        return None if self._compiler is None or wanted is None else self._compiler.known(wanted)

    def prepare(self, params: SamplingParams, known: Outcome | None = None, job: Job | None = None) -> Outcome:
        """``params.structured_outputs``, compiled: an automaton or a grammar for the host's matcher.

        Args:
            known: of ``known``: nothing is compiled.
            job: by which another thread can give the compiling up.

        Raises:
            InvalidRequestError: it cannot be served, alone or with the other parameters.
            BusyError: it could not be compiled now.
        """
        wanted = params.structured_outputs
        assert wanted is not None
        if params.ignore_eos or not self._info.eos_token_ids:
            reason = "ignore_eos is set" if params.ignore_eos else "the model has no end-of-sequence token"
            raise InvalidRequestError(f"{WHERE} end with the end-of-sequence token, but {reason}", WHERE)
        outcome = known or self._ready().compile(wanted, job)
        automaton = outcome.automaton
        if params.min_tokens > 0 and automaton is not None and not automaton.can_go_on:
            raise InvalidRequestError(
                "min_tokens cannot hold: structured_outputs may reach an end that nothing can follow; leave min_tokens out",
                "min_tokens",
            )
        return outcome

    def _ready(self) -> GrammarCompiler:
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is shut down")
            if self._compiler is None:
                vocabulary = vocabulary_of(self._tokenizer, self._info.vocab_size)
                self._teach(vocabulary)
                self._compiler = GrammarCompiler(vocabulary.byte_set())
            return self._compiler

    def close(self) -> None:
        """End the compiling processes. Safe to call twice."""
        with self._lock:
            self._closed = True
        if self._compiler is not None:
            self._compiler.close()
