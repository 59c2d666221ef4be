"""One tool call, ``{"name": ..., "arguments": {...}}``, read while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import msgspec

ARGUMENTS: Final = ("arguments", "parameters")
"""Names that models give to the member with the arguments."""
SPACE: Final = " \n\r\t"


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that began last: a JSON object, in the model's own spelling."""

    text: str


Piece = Content | CallStart | Arguments


class _At(Enum):
    """What comes next."""

    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()
    END = auto()


class _Value:
    """One JSON value as its characters come. Brackets and quotes are followed, no more: the model's spelling is not judged."""

    def __init__(self, first: str) -> None:
        self.first = first
        self._depth = int(first in "{[")
        self._quoted = first == '"'
        self._escaped = False

    def takes(self, char: str) -> bool:
        """Whether a character after the first belongs to a value that no bracket or quote ends."""
        return self.first in '{["' or char not in SPACE + ",}"

    def ends(self, char: str) -> bool:
        """Take a character after the first; True where it ends the value."""
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = char == "\\", char != '"'
            return char == '"' and not self._depth
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return not self._depth
        return False


class CallReader:
    """Reads one object from its first character on. It is a call from the moment its name is known and its arguments begin.

    Args:
        names: an object that names any other function is no call; None: any name will do.

    Attributes:
        text: all that was read; kept until it is a call.
        is_open: there may be more of it.
        is_call: it has begun as a call, which cannot be taken back.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        self.text = ""
        self.is_open = True
        self.is_call = False
        self._at = _At.OPEN
        self._key = ""
        self._value: _Value | None = None
        self._written: list[str] = []
        """The string or value being read."""
        self._name: str | None = None
        self._arguments = ""
        """Arguments that are still to go out."""
        self._has_arguments = False
        self._streams = False
        """Whether the value being read goes out as it comes."""

    def read(self, text: str) -> tuple[list[Piece], str]:
        """Read on: what is certain by now, and the text behind the object's end (or from where it proved to be no call)."""
        used = 0
        while used < len(text) and self.is_open:
            used += self._take(text[used])
        if not self.is_call:
            self.text += text[:used]
        pieces: list[Piece] = []
        if not self.is_call and self._name is not None and (self._has_arguments or self._at is _At.END):
            self.is_call = True
            self._arguments = self._arguments if self._has_arguments else "{}"
            pieces.append(CallStart(self._name))
        if self.is_call and self._arguments:
            pieces.append(Arguments(self._arguments))
            self._arguments = ""
        return pieces, text[used:]

    def _take(self, char: str) -> int:
        """One step on; how many characters it took, 0 or 1."""
        if self._at is _At.IN_VALUE:
            return self._in_value(char)
        if self._at is _At.IN_KEY:
            self._in_key(char)
        elif char not in SPACE:
            return self._between(char)
        return 1

    def _between(self, char: str) -> int:
        """A character that is in no key and no value."""
        if self._at is _At.OPEN and char == "{":
            self._at = _At.KEY
        elif self._at is _At.KEY and char == '"':
            self._at, self._value, self._written = _At.IN_KEY, _Value(char), [char]
        elif self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.VALUE and char not in ",}]":
            return self._begin_value(char)
        elif self._at is _At.AFTER and char == ",":
            self._at = _At.KEY
        elif self._at in (_At.AFTER, _At.KEY) and char == "}":
            self._at, self.is_open = _At.END, False
        else:
            return self._wrong()
        return 1

    def _wrong(self) -> int:
        self.is_open = False
        return 0

    def _in_key(self, char: str) -> None:
        assert self._value is not None
        self._written.append(char)
        if self._value.ends(char):
            key = _decoded("".join(self._written))
            self._key, self._at = key or "", _At.COLON

    def _begin_value(self, char: str) -> int:
        wanted = '"' if self._key == "name" else '{"' if self._key in ARGUMENTS else char
        if char not in wanted:
            return self._wrong()
        self._at, self._value, self._written = _At.IN_VALUE, _Value(char), [char]
        # Models may write the arguments as a string of JSON: that has to be complete first.
        self._streams = self._key in ARGUMENTS and char == "{" and not self._has_arguments
        if self._streams:
            self._has_arguments = True
            self._arguments += char
        return 1

    def _in_value(self, char: str) -> int:
        value = self._value
        assert value is not None
        if not value.takes(char):
            self._at = _At.AFTER
            return 0
        if self._streams:
            self._arguments += char
        else:
            self._written.append(char)
        if value.ends(char):
            self._at = _At.AFTER
            if value.first == '"' and self._key in ("name", *ARGUMENTS):
                return self._end_string("".join(self._written))
        return 1

    def _end_string(self, literal: str) -> int:
        text = _decoded(literal)
        if text is None or (self._key != "name" and not _is_object(text)):
            return self._wrong()
        if self._key == "name" and self._names is not None and self._name is None and text not in self._names:
            return self._wrong()
        if self._name is None or not self._has_arguments:  # else it is a call already
            if self._key == "name":
                self._name = text
            elif not self._has_arguments:
                self._arguments, self._has_arguments = text, True
        return 1


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def _decoded(literal: str) -> str | None:
    """The string that a JSON literal stands for; None if it stands for none."""
    try:
        return msgspec.json.decode(literal, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
