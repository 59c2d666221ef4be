"""Tool calls out of text, piece by piece: content and arguments go through at once, what may become a call is held back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from headway.server.call_reader import Arguments, CallReader, CallStart, Content, Piece

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
BETWEEN: Final = frozenset(" \n\r\t;,[]")
"""What may stand between the objects of a list of calls."""


class ToolParser(Protocol):
    """Reads one completion."""

    def push(self, text: str) -> Iterator[Piece]:
        """More text; what is certain by now."""

    def finish(self) -> Iterator[Piece]:
        """The text has ended; what was held back."""


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen models write it.

    What is not a call after all is content, tags included. White space around calls is dropped.

    Args:
        names: functions that may be called; a call of any other is content.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._held = ""
        self._before = ""
        """White space before the call that is being read."""
        self._reader: CallReader | None = None
        self._closing = False
        self._calls = 0

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while True:
            if self._reader is not None:
                yield from self._read(self._reader)
                if self._reader is not None:
                    return
            if self._closing and not self._close():
                return
            at = self._held.find(OPEN)
            if at < 0:
                yield from self._content(len(self._held) - _open_end(self._held, OPEN))
                return
            yield from self._content(at)
            self._before, _, self._held = self._held.partition(OPEN)
            self._reader = CallReader(self._names)

    def _read(self, reader: CallReader) -> Iterator[Piece]:
        """Let the reader have what is held; it is gone when the call is over, or none."""
        pieces, self._held = reader.read(self._held)
        yield from pieces
        if reader.is_open:
            return
        self._reader = None
        if reader.is_call:
            self._calls += 1
            self._closing = True
        else:
            yield Content(self._before + OPEN)
            self._held = reader.text + self._held

    def _close(self) -> bool:
        """Drop the closing tag, if it is there; False while that is not known."""
        rest = self._held.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE:
            return False
        if rest.startswith(CLOSE):
            self._held = rest.removeprefix(CLOSE)
        self._closing = False
        return True

    def _content(self, end: int) -> Iterator[Piece]:
        """Let go of text up to ``end``, but for white space at its end, which may be a call's surroundings."""
        text = self._held[:end]
        kept = text.rstrip()
        if kept:
            self._held = self._held[len(kept) :]
            yield Content(kept)

    def finish(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        reader, self._reader = self._reader, None
        if reader is not None:
            held = "" if reader.is_call else self._before + OPEN + reader.text
        elif self._closing and CLOSE.startswith(held.strip()):  # cut off in the tag
            held = ""
        if held and not (self._calls and not held.strip()):
            yield Content(held)


def _open_end(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class JsonParser:
    """Objects ``{"name": ..., "parameters": {...}}`` in a row, bare or in a list: Llama 3's form, and that of forced calls.

    An answer that does not begin so is content from its first to its last character.

    Args:
        forced: the grammar allows nothing else; what is left unfinished at the end is content.
        names: functions that may be called; a call of any other is content.
    """

    def __init__(self, forced: bool = False, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._held = ""
        """What has come since the last call, up to the object being read."""
        self._reader: CallReader | None = None
        self._plain = False
        self._calls = 0
        self._forced = self._tag_done = forced

    def push(self, text: str) -> Iterator[Piece]:
        if self._plain:
            yield Content(text)
            return
        if not self._tag_done:
            text, self._held = self._held + text, ""
            if PYTHON_TAG.startswith(text) and text != PYTHON_TAG:
                self._held = text
                return
            text, self._tag_done = text.removeprefix(PYTHON_TAG), True
        while text and not self._plain:
            text = self._skip(text) if self._reader is None else text
            if self._reader is None:
                if text:
                    yield from self._give_up(text)
                return
            pieces, text = self._reader.read(text)
            yield from pieces
            if not self._reader.is_open:
                if self._reader.is_call:
                    self._calls += 1
                    self._held = ""
                    self._reader = None
                else:
                    yield from self._give_up(self._reader.text + text)

    def _skip(self, text: str) -> str:
        """Hold what stands between calls; the rest begins with the next object, which a reader then waits for, or is none."""
        rest = text.lstrip("".join(BETWEEN))
        self._held += text[: len(text) - len(rest)]
        if rest.startswith("{"):
            self._reader = CallReader(self._names)
        return rest

    def _give_up(self, text: str) -> Iterator[Piece]:
        self._plain, self._reader = True, None
        held, self._held = self._held + text, ""
        yield Content(held)

    def finish(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        reader, self._reader = self._reader, None
        if reader is not None:
            held = "" if reader.is_call else held + reader.text
        rest = held.strip("".join(BETWEEN)) if self._calls or self._forced else held
        if rest:
            yield Content(rest)


class NamedParser:
    """The whole text is the arguments of the one function that was asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Iterator[Piece]:
        if not self._begun:
            self._begun = True
            yield CallStart(self._name)
        yield Arguments(text)

    def finish(self) -> Iterator[Piece]:
        yield from ()


class EitherParser:
    """A list of calls, or an object that is the answer: the first character tells."""

    def __init__(self) -> None:
        self._parser: ToolParser | None = None

    def push(self, text: str) -> Iterator[Piece]:
        if self._parser is None and text:
            self._parser = JsonParser(forced=True) if text[0] == "[" else PlainParser()
        return iter(()) if self._parser is None else self._parser.push(text)

    def finish(self) -> Iterator[Piece]:
        return iter(()) if self._parser is None else self._parser.finish()


class PlainParser:
    """No tools: all is content."""

    def push(self, text: str) -> Iterator[Piece]:
        yield Content(text)

    def finish(self) -> Iterator[Piece]:
        yield from ()
