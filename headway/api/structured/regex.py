"""Regular expressions in Python's syntax as parts of an automaton; the text has to match as a whole.

Python's own parser reads them, so that whatever is accepted here means what ``re.fullmatch`` says. ``\\d`` and ``\\w`` are
ASCII, and ``\\D`` and ``\\W`` the rest of ASCII: less than Python allows, never more. What an automaton cannot do (back
references, look-around) or would do differently (possessive repeats) is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from re import _constants, _parser  # type: ignore[attr-defined,unused-ignore]  # the one parser that agrees with re
from typing import Any

from headway.api.structured import charset
from headway.api.structured.charset import CharSet
from headway.api.structured.nfa import At, Pen

MAX_DEPTH = 100

CharPart = Callable[[Pen, At, CharSet], At]
"""How one character of a set is written: as itself, or inside a JSON string."""


class RefusedError(Exception):
    """The grammar is wrong or asks for something that is not supported; the message says what."""


_POSITIVE: dict[Any, CharSet] = {
    _constants.CATEGORY_DIGIT: charset.DIGITS,
    _constants.CATEGORY_SPACE: charset.SPACES,
    _constants.CATEGORY_WORD: charset.WORDS,
}
_NEGATIVE = {
    _constants.CATEGORY_NOT_DIGIT: _constants.CATEGORY_DIGIT,
    _constants.CATEGORY_NOT_SPACE: _constants.CATEGORY_SPACE,
    _constants.CATEGORY_NOT_WORD: _constants.CATEGORY_WORD,
}
_BEGINNINGS = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
_ENDS = (_constants.AT_END, _constants.AT_END_STRING)
_LACKING = {
    _constants.GROUPREF: "back references",
    _constants.GROUPREF_EXISTS: "conditional groups",
    _constants.ASSERT: "look-around",
    _constants.ASSERT_NOT: "look-around",
    _constants.ATOMIC_GROUP: "atomic groups",
    _constants.POSSESSIVE_REPEAT: "possessive repeats",
}
_NO_FLAGS_BUT = re.IGNORECASE | re.DOTALL | re.VERBOSE | re.UNICODE


def plain(nfa: Pen, entry: At, chars: CharSet) -> At:
    """A character as its own UTF-8."""
    return nfa.chars(entry, chars)


def parse(pattern: str) -> Any:
    """The syntax tree. Raises RefusedError when the pattern is not valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that may mean something else one day
            tree = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise RefusedError(f"the pattern is not valid: {error}") from None
    except RecursionError:
        raise RefusedError("the pattern is nested too deeply") from None
    _check_flags(tree.state.flags)
    return tree


def _check_flags(flags: int) -> None:
    if flags & ~_NO_FLAGS_BUT:
        raise RefusedError("the pattern uses a flag other than i, s and x, which are supported")


def full_match(nfa: Pen, entry: At, pattern: str) -> At:
    """Add the texts that ``pattern`` matches as a whole."""
    tree = parse(pattern)
    return _Builder(nfa, plain).sequence(entry, list(tree), tree.state.flags, True, True)


def search(nfa: Pen, entry: At, pattern: str, write: CharPart, any_char: CharSet) -> At:
    """Add the texts in which ``pattern`` is found somewhere, as JSON schemas mean it."""
    tree = parse(pattern)
    builder, flags = _Builder(nfa, write), tree.state.flags
    items = list(tree)
    branches = items[0][1][1] if len(items) == 1 and items[0][0] is _constants.BRANCH else [items]

    def anything(at: At) -> At:
        return nfa.repeat(at, lambda start: write(nfa, start, any_char), 0, None)

    def branch(at: At, parts: list[Any]) -> At:
        begins = bool(parts) and parts[0][0] is _constants.AT and parts[0][1] in _BEGINNINGS
        ends = bool(parts) and parts[-1][0] is _constants.AT and parts[-1][1] in _ENDS
        at = builder.sequence(at if begins else anything(at), parts, flags, begins, ends)
        return at if ends else anything(at)

    return nfa.either(entry, [partial(branch, parts=list(each)) for each in branches])


class _Builder:
    """Walks a syntax tree. ``first`` and ``last``: nothing of the text comes before, or after."""

    def __init__(self, nfa: Pen, write: CharPart) -> None:
        self._nfa, self._write = nfa, write
        self._depth = 0

    def sequence(self, entry: At, items: list[Any], flags: int, first: bool, last: bool) -> At:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RefusedError("the pattern is nested too deeply")
        wide = [i for i, (kind, _) in enumerate(items) if kind is not _constants.AT]
        begin, end = (wide[0], wide[-1]) if wide else (len(items), -1)
        for i, (kind, value) in enumerate(items):
            entry = self._item(entry, kind, value, flags, first and i <= begin, last and i >= end)
        self._depth -= 1
        return entry

    def _item(self, entry: At, kind: Any, value: Any, flags: int, first: bool, last: bool) -> At:
        if kind in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY):
            return self._write(self._nfa, entry, _chars(kind, value, flags))
        if kind is _constants.SUBPATTERN:
            _, added, dropped, items = value
            _check_flags(added)
            return self.sequence(entry, list(items), (flags | added) & ~dropped, first, last)
        if kind is _constants.BRANCH:
            parts = [
                partial(self.sequence, items=list(branch), flags=flags, first=first, last=last) for branch in value[1]
            ]
            return self._nfa.either(entry, parts)
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, items = value
            endless = most is _constants.MAXREPEAT

            def part(at: At) -> At:
                return self.sequence(at, list(items), flags, first and most == 1, last and most == 1)

            return self._nfa.repeat(entry, part, least, None if endless else most)
        if kind is _constants.AT:
            if (first and value in _BEGINNINGS) or (last and value in _ENDS):
                return entry
            raise RefusedError("the pattern has an anchor other than ^ at its beginning and $ at its end")
        raise RefusedError(f"the pattern uses {_LACKING.get(kind, str(kind).lower())}, which no automaton follows")


def _chars(kind: Any, value: Any, flags: int) -> CharSet:
    """The set of one character item."""
    if kind is _constants.ANY:
        return charset.EVERY if flags & re.DOTALL else charset.minus(charset.EVERY, charset.of("\n"))
    if kind is not _constants.IN:
        single = _fold(charset.charset([(value, value)]), flags)
        return _others(single, flags) if kind is _constants.NOT_LITERAL else single
    negated = value[0][0] is _constants.NEGATE
    sets = [_member(each, argument, negated) for each, argument in value if each is not _constants.NEGATE]
    chars = _fold(charset.union(*sets), flags)
    return _others(chars, flags) if negated else chars


def _others(chars: CharSet, flags: int) -> CharSet:
    """The complement. Ignoring case, Python takes a few letters beyond ASCII for ASCII ones: it ends there."""
    rest = charset.complement(chars)
    return charset.minus(rest, charset.NOT_ASCII) if flags & re.IGNORECASE else rest


def _member(kind: Any, value: Any, at_most: bool) -> CharSet:
    """One member of a class: never more than Python's set or, ``at_most`` (under a negation), never less."""
    if kind is _constants.LITERAL:
        return charset.charset([(value, value)])
    if kind is _constants.RANGE:
        return charset.charset([value])
    if kind is not _constants.CATEGORY:
        raise RefusedError(f"the pattern uses {str(kind).lower()} in a class, which is not supported")
    negative = _NEGATIVE.get(value)
    positive = _POSITIVE[value if negative is None else negative]
    exact = positive is charset.SPACES
    if negative is not None:
        rest = charset.complement(positive)
        return rest if exact or at_most else charset.minus(rest, charset.NOT_ASCII)
    return positive if exact or not at_most else charset.union(positive, charset.NOT_ASCII)


def _fold(chars: CharSet, flags: int) -> CharSet:
    """With IGNORECASE, ASCII letters of either case."""
    if not flags & re.IGNORECASE:
        return chars
    if any(high > 0x7F for _, high in chars):
        raise RefusedError("the pattern ignores case and has characters beyond ASCII; spell both cases out")
    letters = {chr(c) for low, high in chars for c in range(low, high + 1) if chr(c).isalpha()}
    return charset.union(chars, charset.of("".join(sorted({c.swapcase() for c in letters}))))
