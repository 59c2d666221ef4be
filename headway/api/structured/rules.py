"""Context-free grammars for the host's matcher, made with the verbs that also make automata.

An automaton's state is a number; here it is what has been written so far: a sequence of symbols (``Rules``) or one regular
expression (``Pattern``). So one description of a schema makes both, and both have the same language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from headway.api.structured.charset import CharSet
from headway.api.structured.regex import RefusedError

MAX_RULES = 20_000


class Symbol(NamedTuple):
    """One symbol: a text ("text"), a regular expression ("regex"), a rule ("rule"), one of some sequences ("either"), or a
    sequence that repeats ("repeat", with ``least`` and ``most``).
    """

    kind: str
    value: Any
    least: int = 0
    most: int | None = None


Sequence = tuple[Symbol, ...]


class Drawn(NamedTuple):
    """A regular expression so far, and the most characters that it counts off one by one."""

    text: str = ""
    length: int = 0


class Pattern:
    """Writes one regular expression, as Rust's regex crate reads it."""

    def text(self, entry: Drawn, data: bytes) -> Drawn:
        """Exactly this text."""
        text = data.decode()
        return Drawn(entry.text + "".join(_char(ord(char)) for char in text), entry.length + len(text))

    def chars(self, entry: Drawn, chars: CharSet) -> Drawn:
        """One character of the set. Raises RefusedError: it is empty."""
        # Surrogates are in our sets, and in no text.
        cut = [part for low, high in chars for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high))]
        members = "".join(f"{_char(low)}-{_char(high)}" for low, high in dict.fromkeys(cut) if low <= high)
        if not members:
            raise RefusedError("no character is left where its pattern needs one")
        return Drawn(f"{entry.text}[{members}]", entry.length + 1)

    def either(self, entry: Drawn, parts: Iterable[Callable[[Drawn], Drawn]]) -> Drawn:
        """One of the parts."""
        made = [part(Drawn()) for part in parts]
        longest = max((each.length for each in made), default=0)
        return Drawn(f"{entry.text}(?:{'|'.join(each.text for each in made)})", entry.length + longest)

    def repeat(self, entry: Drawn, part: Callable[[Drawn], Drawn], least: int, most: int | None) -> Drawn:
        """The part ``least`` to ``most`` times; None: without end."""
        if most == 0:
            return entry
        made = part(Drawn())
        count = f"{{{least},{'' if most is None else most}}}"
        times = max(least, 1) if most is None else most
        return Drawn(f"{entry.text}(?:{made.text}){count}", entry.length + made.length * times)


class Rules:
    """Writes rules. Its states are sequences of symbols."""

    def __init__(self) -> None:
        self._rules: dict[str, Sequence] = {}

    def text(self, entry: Sequence, data: bytes) -> Sequence:
        return (*entry, Symbol("text", data.decode())) if data else entry

    def regex(self, entry: Sequence, patterns: list[str]) -> Sequence:
        """What all of the patterns match."""
        return (*entry, Symbol("regex", tuple(patterns)))

    def either(self, entry: Sequence, parts: Iterable[Callable[[Sequence], Sequence]]) -> Sequence:
        return (*entry, Symbol("either", tuple(part(()) for part in parts)))

    def repeat(self, entry: Sequence, part: Callable[[Sequence], Sequence], least: int, most: int | None) -> Sequence:
        return entry if most == 0 else (*entry, Symbol("repeat", part(()), least, most))

    def rule(self, entry: Sequence, name: str, make: Callable[[Sequence], Sequence]) -> Sequence:
        """The rule of this name, made when it is first used; it may use itself."""
        if name not in self._rules:
            self.define(name, ())
            self._rules[name] = make(())
        return (*entry, Symbol("rule", name))

    def define(self, name: str, body: Sequence) -> None:
        """Write the rule of this name."""
        if len(self._rules) >= MAX_RULES:
            raise RefusedError(f"it needs more than {MAX_RULES} rules")
        self._rules[name] = body

    def lark(self, whole: Sequence) -> str:
        """The grammar of ``whole`` in Lark's syntax.

        Raises:
            RefusedError: it has no text of finite length, or a rule begins with itself, and no validator could judge a text.
        """
        ends = self._ending()
        if not _ends(whole, ends):
            raise RefusedError("no JSON of finite length satisfies it: what it refers to needs itself again")
        self._refuse_left_recursion()
        numbers = {name: f"r{i}" for i, name in enumerate(self._rules)}
        printer = _Printer(ends, numbers)
        lines = [f"start: {printer.sequence(whole) or _EMPTY}"]
        for name, body in self._rules.items():
            if name in ends:
                lines.append(f"{numbers[name]}: {printer.sequence(body) or _EMPTY}")
        return "\n".join([*lines, *(f"{name}: {body}" for body, name in printer.terminals.items())]) + "\n"

    def _refuse_left_recursion(self) -> None:
        """Depth first along the rules that others begin with; every text and every regular expression takes a character."""
        done: set[str] = set()
        for root in self._rules:
            open_: dict[str, list[str]] = {root: _beginnings(self._rules[root])} if root not in done else {}
            while open_:
                name, left = next(reversed(open_.items()))
                following = left.pop() if left else None
                if following is None:
                    done.add(name)
                    del open_[name]
                elif following in open_:
                    raise RefusedError("a $ref in it leads back to itself with nothing between; remove that branch")
                elif following not in done:
                    open_[following] = _beginnings(self._rules[following])

    def _ending(self) -> set[str]:
        """Rules from which some text of finite length comes."""
        ends: set[str] = set()
        while True:
            before = len(ends)
            for name, body in self._rules.items():
                if name not in ends and _ends(body, ends):
                    ends.add(name)
            if len(ends) == before:
                return ends


_EMPTY = '""'


def _ends(sequence: Sequence, ends: set[str]) -> bool:
    return all(_symbol_ends(symbol, ends) for symbol in sequence)


def _symbol_ends(symbol: Symbol, ends: set[str]) -> bool:
    if symbol.kind == "rule":
        return symbol.value in ends
    if symbol.kind == "either":
        return any(_ends(each, ends) for each in symbol.value)
    return symbol.kind != "repeat" or symbol.least == 0 or _ends(symbol.value, ends)


def _beginnings(sequence: Sequence) -> list[str]:
    """Rules that the sequence may begin with. What may be empty, and what follows it, both count."""
    found: list[str] = []
    for symbol in sequence:
        if symbol.kind == "rule":
            found.append(symbol.value)
            break  # a rule writes a value or the inside of an object, behind which only its end follows
        if symbol.kind == "either":
            found += [name for each in symbol.value for name in _beginnings(each)]
            if all(symbol.value):
                break
        elif symbol.kind == "repeat":
            found += _beginnings(symbol.value)
            if symbol.least > 0 and symbol.value:
                break
        else:
            break
    return found


class _Printer:
    """Symbols as text, without what never ends."""

    def __init__(self, ends: set[str], names: dict[str, str]) -> None:
        self._ends, self._names = ends, names
        self.terminals: dict[str, str] = {}

    def sequence(self, sequence: Sequence) -> str:
        return " ".join(filter(None, map(self._symbol, sequence)))

    def _symbol(self, symbol: Symbol) -> str:
        if symbol.kind == "text":
            return json.dumps(symbol.value, ensure_ascii=False)
        if symbol.kind == "regex":
            body = " & ".join(f"/{each}/" for each in symbol.value)
            return self.terminals.setdefault(body, f"T{len(self.terminals)}")
        if symbol.kind == "rule":
            return self._names[symbol.value]
        if symbol.kind == "repeat":
            inner = self.sequence(symbol.value) if _ends(symbol.value, self._ends) else ""
            if not inner:
                return ""
            if symbol.most is None and symbol.least <= 1:
                return f"({inner}){'+' if symbol.least else '*'}"
            return f"({inner}){{{symbol.least},{'' if symbol.most is None else symbol.most}}}"
        texts = [self.sequence(each) for each in symbol.value if _ends(each, self._ends)]
        full = list(dict.fromkeys(text for text in texts if text))
        if not full:
            return ""
        return f"({' | '.join(full)}){'?' if len(full) < len(set(texts)) else ''}"


def _char(code: int) -> str:
    """One character in a regular expression or a class of one."""
    plain = chr(code)
    if code < 0x80 and re.fullmatch(r"[A-Za-z0-9 _\",:;<>=@%!'~`#&]", plain):
        return plain
    return f"\\x{{{code:x}}}"
