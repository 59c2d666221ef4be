"""Tool calls out of text, piece by piece: what is content goes through at once, what may become a call is held back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
BETWEEN: Final = frozenset(" \n\r\t;,[]")
"""What may stand between the objects of a list of calls."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the one call that was asked for by name."""

    text: str


Piece = Content | Call | Arguments


class ToolParser(Protocol):
    """Reads one completion."""

    def push(self, text: str) -> Iterator[Piece]:
        """More text; what is certain by now."""

    def finish(self) -> Iterator[Piece]:
        """The text has ended; what was held back."""


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen models write it.

    What is not a call after all is content, tags included. White space around calls is dropped.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._calls = 0
        self._seen = 0
        """How much of a call's text has been searched for its end."""

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while True:
            if self._inside:
                end = self._held.find(CLOSE, max(0, self._seen - len(CLOSE)))
                self._seen = len(self._held)
                if end < 0:
                    return
                body, self._held = self._held[:end], self._held[end + len(CLOSE) :]
                self._inside = False
                yield from self._call(body, CLOSE)
                continue
            at = self._held.find(OPEN)
            if at < 0:
                yield from self._content(len(self._held) - _open_end(self._held, OPEN))
                return
            yield from self._content(at)
            self._held = self._held.partition(OPEN)[2]
            self._inside, self._seen = True, 0

    def _content(self, end: int) -> Iterator[Piece]:
        """Let go of text up to ``end``, but for white space at its end, which may be a call's surroundings."""
        text = self._held[:end]
        kept = text.rstrip()
        if kept:
            self._held = self._held[len(kept) :]
            yield Content(kept)

    def _call(self, body: str, close: str) -> Iterator[Piece]:
        call = parse_call(body)
        if call is None:
            yield Content(OPEN + body + close)
        else:
            self._calls += 1
            yield call

    def finish(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        if self._inside:
            self._inside = False
            yield from self._call(held, "")
        elif held and not (self._calls and not held.strip()):
            yield Content(held)


def _open_end(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def parse_call(text: str) -> Call | None:
    """One call from its JSON object; None if it is none."""
    try:
        value: Any = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], msgspec.json.encode(arguments).decode())


class JsonParser:
    """Objects ``{"name": ..., "parameters": {...}}`` in a row, bare or in a list: Llama 3's form, and that of forced calls.

    An answer that does not begin so is content from its first to its last character.

    Args:
        forced: the grammar allows nothing else; what is left unfinished at the end is content.
    """

    def __init__(self, forced: bool = False) -> None:
        self._held = ""
        self._at = 0
        self._depth = 0
        self._start = 0
        self._quoted = self._escaped = False
        self._plain = False
        self._calls = 0
        self._forced = forced

    def push(self, text: str) -> Iterator[Piece]:
        if self._plain:
            yield Content(text)
            return
        self._held += text
        if not self._calls and self._depth == 0 and not self._forced:
            if PYTHON_TAG.startswith(self._held):
                return
            if self._held.startswith(PYTHON_TAG):
                self._held, self._at = self._held[len(PYTHON_TAG) :], 0
        while self._at < len(self._held):
            if self._depth == 0 and self._held[self._at] != "{" and self._held[self._at] not in BETWEEN:
                yield from self._give_up()
                return
            if self._step(self._held[self._at]):
                call = parse_call(self._held[self._start : self._at])
                if call is None:
                    yield from self._give_up()
                    return
                self._calls += 1
                self._held, self._at = self._held[self._at :], 0
                yield call

    def _step(self, char: str) -> bool:
        """Take one character; True when an object is complete."""
        self._at += 1
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = char == "\\", char != '"'
        elif char == '"':
            self._quoted = self._depth > 0
        elif char == "{":
            if self._depth == 0:
                self._start = self._at - 1
            self._depth += 1
        elif char == "}":
            self._depth -= 1
            return self._depth == 0
        return False

    def _give_up(self) -> Iterator[Piece]:
        self._plain = True
        held, self._held = self._held, ""
        if held:
            yield Content(held)

    def finish(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        rest = held.strip("".join(BETWEEN)) if self._calls or self._forced else held
        if rest and not self._plain:
            yield Content(rest)


class NamedParser:
    """The whole text is the arguments of the one function that was asked for."""

    def push(self, text: str) -> Iterator[Piece]:
        yield Arguments(text)

    def finish(self) -> Iterator[Piece]:
        yield from ()


class PlainParser:
    """No tools: all is content."""

    def push(self, text: str) -> Iterator[Piece]:
        yield Content(text)

    def finish(self) -> Iterator[Piece]:
        yield from ()
