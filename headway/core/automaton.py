"""What a compiled grammar and a vocabulary look like on their way from the front end to the device: plain bytes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

from headway.core.errors import InvalidRequestError

DEAD = 0
"""The state that nothing leaves and nothing accepts."""

CLASS_INTS = 256
"""int32 values that the classes of the 256 bytes take, one each."""
MAX_TRANSITION_INTS = 64 * 1024
MAX_TRANSITIONS = 2 * MAX_TRANSITION_INTS
MAX_STATES = 2**15 - 1
MAX_TABLE_INTS = CLASS_INTS + MAX_TRANSITION_INTS + (MAX_STATES + 1) // 2
"""Room of one slot for an automaton: 128 thousand transitions and the kinds of all states, 321 KiB."""

MAX_TOKEN_BYTES = 32
"""Longer tokens (runs of blanks or dashes, mostly) are not used inside a grammar: shorter ones spell the same text."""

MATCHER_LIMITS = {"max_lexer_states": 40_000, "max_items_in_row": 20_000, "verbose_errors": False}
"""Of the host's matcher for one request, at the door and in the engine: they bound what it remembers, to some 80 MB."""


class Automaton(msgspec.Struct, frozen=True, array_like=True):
    """A deterministic automaton over the bytes of a text.

    States are 0..num_states - 1. State 0 is dead; from every other state some text leads to acceptance; states from
    ``first_accepting`` on accept.

    Attributes:
        start: state before the first byte.
        classes: 256 bytes, byte -> class; bytes of one class are alike everywhere.
        transitions: uint16 [num_states, num_classes], little-endian, row-major: the next state.
        can_go_on: no accepting state is a dead end, so a text need never end.
        kinds: uint16 [num_states], little-endian: states of one kind can read the same texts of up to MAX_TOKEN_BYTES bytes.
    """

    num_states: int
    num_classes: int
    start: int
    first_accepting: int
    can_go_on: bool
    classes: bytes
    transitions: bytes
    kinds: bytes

    def check(self) -> None:
        """Raises InvalidRequestError when the numbers contradict each other or exceed a slot's room."""
        inside = 0 < self.start < self.num_states <= MAX_STATES and 0 < self.num_classes <= 256
        inside = inside and 0 < self.first_accepting <= self.num_states
        size = self.num_states * self.num_classes
        inside = inside and size <= MAX_TRANSITIONS and len(self.transitions) == 2 * size
        inside = inside and len(self.kinds) == 2 * self.num_states
        if not inside or len(self.classes) != 256 or max(self.classes) >= self.num_classes:
            raise InvalidRequestError("the compiled grammar is malformed", "structured_outputs")

    def walk(self, state: int, text: bytes) -> int:
        """The state after ``text``."""
        table, width, classes = memoryview(self.transitions).cast("H"), self.num_classes, self.classes
        for byte in text:
            state = table[state * width + classes[byte]]
        return state

    def accepts(self, text: bytes) -> bool:
        """Whether ``text`` as a whole is in the language."""
        return self.walk(self.start, text) >= self.first_accepting


class Vocabulary(msgspec.Struct, array_like=True, dict=True):
    """The bytes of every token that may be part of a text.

    Attributes:
        lengths: uint16 [V], little-endian; 0 for special tokens and ids without text: never allowed in a grammar.
        data: the tokens' bytes, one after the other.
    """

    lengths: bytes
    data: bytes

    @classmethod
    def of(cls, tokens: Iterable[bytes]) -> Vocabulary:
        """From the bytes of each token, b"" for one that has none. Tokens of over 65,535 bytes count as none."""
        kept = [token if len(token) < 2**16 else b"" for token in tokens]
        return cls(b"".join(len(token).to_bytes(2, "little") for token in kept), b"".join(kept))

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.lengths) // 2

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each token."""
        found, end = [], 0
        for length in memoryview(self.lengths).cast("H"):
            found.append(self.data[end : end + length])
            end += length
        return found

    def byte_set(self) -> frozenset[int]:
        """Bytes that have a token of their own."""
        return frozenset(token[0] for token in self.tokens if len(token) == 1)
