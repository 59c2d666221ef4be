"""Grammars that no table holds: a matcher per request, in a thread of their own, so that the host loop never waits for one.

Such a request *lags*: its next token can be drawn only when the matcher has seen the last one. Others run ahead as ever.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headway.core.automaton import MATCHER_LIMITS, Vocabulary
from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.plan import Int32s
from headway.sampling.logit_edits import token_bits

SPELLED_BYTES = 256
"""So much of a text that a grammar forces is spelled in tokens; the library asks again in each step, and for all of it."""


class Next(NamedTuple):
    """What a request may draw next (int32 words, see ``StepPlan.masks``), or why it can go on no more."""

    request_id: str
    mask: Int32s | None
    error: str | None = None


@dataclass(slots=True)
class _Open:
    """One request. ``matcher`` belongs to the thread, the rest to the host loop."""

    request: AddRequest
    may: Int32s
    matcher: Any = None
    mask: Int32s | None = None


class _Spelling:
    """The vocabulary as the matcher library wants it. It asks how texts that the grammar forces may be spelled; the longest
    token first is as good as any answer, since forced texts are masked like all others, and so is a part of it.
    """

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids: list[int] = []
        self._ids = {text: token for token, text in enumerate(tokens) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        found: list[int] = []
        start = 0
        text = text[:SPELLED_BYTES]
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                return found
            found.append(self._ids[text[start:end]])
            start = end
        return found


class HostGrammars:
    """Matchers of all open requests that have a grammar on the host. One thread calls everything.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._open: dict[str, _Open] = {}
        self._pending: dict[Future[Next], _Open] = {}
        self._thread: ThreadPoolExecutor | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def is_working(self) -> bool:
        """Whether some mask is being computed."""
        return bool(self._pending)

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of the model's tokens; only the first call does anything."""
        self._vocabulary = self._vocabulary or vocabulary

    def open(self, request: AddRequest) -> None:
        """Start a request's matcher; its first mask comes out of ``ready``.

        Raises:
            InvalidRequestError: the vocabulary is not known, or the id is open.
        """
        if self._vocabulary is None or request.request_id in self._open:
            raise InvalidRequestError(
                "structured_outputs need the vocabulary's bytes, and the engine was never told them"
                if self._vocabulary is None
                else f"request id {request.request_id!r} is already open; ids must be unique",
                "structured_outputs",
            )
        spelled = [token for token, text in enumerate(self._vocabulary.tokens[: self._vocab_size]) if text]
        may = token_bits([*spelled, *request.eos_token_ids], self._vocab_size)
        if request.params.allowed_token_ids is not None:
            may &= token_bits(request.params.allowed_token_ids, self._vocab_size)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="headway-grammars")
        self._open[request.request_id] = opened = _Open(request, may)
        self._submit(opened, None)

    def feed(self, request_id: str, token: int) -> None:
        """The request drew ``token``; the mask after it comes out of ``ready``."""
        opened = self._open[request_id]
        opened.mask = None
        self._submit(opened, token)

    def allows(self, request_id: str, token: int) -> bool:
        """Whether the mask that ``ready`` gave last holds the token."""
        mask = self._open[request_id].mask
        return mask is not None and bool(int(mask[token // 32]) >> (token % 32) & 1)

    def request(self, request_id: str) -> AddRequest:
        """The open request of this id."""
        return self._open[request_id].request

    def drop(self, request_id: str) -> None:
        """The request is over. Unknown ids are ignored."""
        self._open.pop(request_id, None)
        if not self._open and self._thread is not None:  # idle engines keep no thread
            self._thread.shutdown(wait=False)
            self._thread = None

    def ready(self) -> list[Next]:
        """Masks that have come since the last call; never blocks."""
        found = []
        for future in [each for each in self._pending if each.done()]:
            opened, outcome = self._pending.pop(future), future.result()
            if self._open.get(outcome.request_id) is opened:
                opened.mask = outcome.mask
                found.append(outcome)
        return found

    def wait(self, seconds: float) -> None:
        """Sleep until a mask is ready, ``seconds`` at most."""
        wait(self._pending, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _submit(self, opened: _Open, token: int | None) -> None:
        assert self._thread is not None
        self._pending[self._thread.submit(self._next, opened, token)] = opened

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _next(self, opened: _Open, token: int | None) -> Next:
        request_id = opened.request.request_id
        try:
            if token is None:
                opened.matcher = self._new_matcher(opened.request)
            elif opened.matcher.try_consume_tokens([token]) != 1:
                fault = _first_line(opened.matcher.get_error()) if opened.matcher.is_error() else ""
                return Next(request_id, None, fault or f"its grammar does not allow token {token}")
            mask = np.frombuffer(opened.matcher.compute_bitmask(), np.int32)
            if opened.matcher.is_error():
                return Next(request_id, None, _first_line(opened.matcher.get_error()))
        except BaseException as error:  # the library's panics are no Exceptions
            return Next(request_id, None, _first_line(f"{type(error).__name__}: {error}"))
        whole = np.zeros_like(opened.may)
        whole[: len(mask)] = mask[: len(whole)]
        whole &= opened.may
        if not whole.any():
            return Next(request_id, None, "its grammar and its other demands leave no token")
        return Next(request_id, whole)

    def _new_matcher(self, request: AddRequest) -> Any:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

        eos = tuple(request.eos_token_ids)
        if eos not in self._tokenizers:
            assert self._vocabulary is not None
            tokens = self._vocabulary.tokens[: self._vocab_size]
            tokens += [b""] * (self._vocab_size - len(tokens))
            wrapper = TokenizerWrapper(_Spelling(tokens, eos[0] if eos else 0))
            self._tokenizers[eos] = LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=list(eos) or None)
        limits = LLParserLimits(**MATCHER_LIMITS)
        return LLMatcher(self._tokenizers[eos], request.host_grammar, log_level=0, limits=limits)


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:300]
