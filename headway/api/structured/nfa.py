"""Nondeterministic automata over bytes, and the way from one to an ``Automaton`` (subset construction; Rabin, Scott 1959).

A part of a grammar is a function that adds itself behind an entry state and returns its exit state. It may add edges to
its entry, never edges back to it.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from headway.api.structured import charset
from headway.api.structured.charset import CharSet, Range
from headway.api.structured.kinds import kinds_of
from headway.core.automaton import MAX_STATES, MAX_TOKEN_BYTES, MAX_TRANSITIONS, Automaton

MAX_NFA_STATES = 60_000

At = Any
"""Where the next part begins: a state of an automaton, or what a writer of ``rules`` has written so far."""
Part = Callable[[At], At]


class Pen(Protocol):
    """What automata and regular expressions have in common: they are written part by part."""

    def text(self, entry: At, data: bytes) -> At: ...

    def chars(self, entry: At, chars: CharSet) -> At: ...

    def either(self, entry: At, parts: Iterable[Part]) -> At: ...

    def repeat(self, entry: At, part: Part, least: int, most: int | None) -> At: ...


class NotRegularError(Exception):
    """No table of bounded size holds the grammar; the message says why."""


class Nfa:
    """States and their edges. State 0 is where a text begins."""

    def __init__(self) -> None:
        self._edges: list[list[tuple[Range, int]]] = [[]]
        self._empty: list[list[int]] = [[]]

    def state(self) -> int:
        """A new state. Raises NotRegularError when there are too many."""
        if len(self._edges) >= MAX_NFA_STATES:
            raise NotRegularError(f"it needs more than {MAX_NFA_STATES} states")
        self._edges.append([])
        self._empty.append([])
        return len(self._edges) - 1

    def join(self, source: int, target: int) -> None:
        """``target`` may follow ``source`` without a byte."""
        self._empty[source].append(target)

    def text(self, entry: int, data: bytes) -> int:
        """Exactly these bytes."""
        for byte in data:
            exit_ = self.state()
            self._edges[entry].append(((byte, byte), exit_))
            entry = exit_
        return entry

    def chars(self, entry: int, chars: CharSet) -> int:
        """One character of the set."""
        exit_ = self.state()
        tails: dict[charset.Sequence, int] = {(): exit_}

        def tail(rest: charset.Sequence) -> int:
            if rest not in tails:
                tails[rest] = self.state()
                self._edges[tails[rest]].append((rest[0], tail(rest[1:])))
            return tails[rest]

        for sequence in charset.utf8(chars):
            self._edges[entry].append((sequence[0], tail(sequence[1:])))
        return exit_

    def either(self, entry: int, parts: Iterable[Part]) -> int:
        """One of the parts."""
        exit_ = self.state()
        for part in parts:
            self.join(part(entry), exit_)
        return exit_

    def repeat(self, entry: int, part: Part, least: int, most: int | None) -> int:
        """The part ``least`` to ``most`` times; None: without end."""
        for _ in range(least):
            entry = part(entry)
        if most is None:
            loop = self.state()
            self.join(entry, loop)
            self.join(part(loop), loop)
            return loop
        ends = [entry]
        for _ in range(most - least):
            ends.append(part(ends[-1]))
        exit_ = self.state()
        for end in ends:
            self.join(end, exit_)
        return exit_

    # -- determinisation -------------------------------------------------------------------------------------------

    def determinise(self, exit_: int, usable: frozenset[int]) -> Automaton | None:
        """The automaton of the texts that lead from state 0 to ``exit_``; None when there are none.

        Args:
            usable: bytes that may be written; others lead nowhere.

        Raises:
            NotRegularError: the table exceeds a slot's room.
        """
        classes, samples = self._classes(usable)
        moves = self._moves(samples)
        closures = _Closures(self._empty, {exit_, *(state for state, edges in enumerate(moves) if edges)})
        width = len(samples) + 1  # class 0: bytes that never occur
        start = closures.of(0)
        numbers = {start: 0}
        queue, table = [start], []
        for members in queue:
            row = [-1] * width
            targets: dict[int, frozenset[int]] = {}
            for state in members:
                for class_, target in moves[state]:
                    reached = closures.of(target)
                    targets[class_] = targets[class_] | reached if class_ in targets else reached
            for class_, reached in targets.items():
                number = numbers.get(reached)
                if number is None:
                    number = numbers[reached] = len(queue)
                    queue.append(reached)
                row[class_] = number
            table.append(row)
            if len(queue) >= MAX_STATES or len(queue) * width > MAX_TRANSITIONS:
                raise NotRegularError(
                    f"its automaton has over {len(queue)} states of {width} transitions; {MAX_TRANSITIONS} fit in all"
                )
        return _assemble(table, [exit_ in members for members in queue], classes)

    def _classes(self, usable: frozenset[int]) -> tuple[bytes, list[int]]:
        """Class of each byte, and one byte of each class from 1 on. Bytes that no edge tells apart share a class."""
        spans = sorted({span for edges in self._edges for span, _ in edges})
        classes, samples = bytearray(256), []
        known: dict[tuple[int, ...], int] = {(): 0}
        for byte in sorted(usable):
            inside = tuple(i for i, (low, high) in enumerate(spans) if low <= byte <= high)
            if inside not in known:
                known[inside] = len(known)
                samples.append(byte)
            classes[byte] = known[inside]
        return bytes(classes), samples

    def _moves(self, samples: list[int]) -> list[list[tuple[int, int]]]:
        """Per state, (class, target) of each byte it can read."""
        spans: dict[Range, list[int]] = {}
        found = []
        for edges in self._edges:
            moves = []
            for span, target in edges:
                if span not in spans:
                    spans[span] = [i + 1 for i, byte in enumerate(samples) if span[0] <= byte <= span[1]]
                moves += [(class_, target) for class_ in spans[span]]
            found.append(moves)
        return found


class _Closures:
    """States of ``kept`` that are reachable without a byte."""

    def __init__(self, empty: list[list[int]], kept: set[int]) -> None:
        self._empty, self._kept = empty, kept
        self._known: dict[int, frozenset[int]] = {}

    def of(self, state: int) -> frozenset[int]:
        known = self._known.get(state)
        if known is None:
            seen, stack = {state}, [state]
            while stack:
                for target in self._empty[stack.pop()]:
                    if target not in seen:
                        seen.add(target)
                        stack.append(target)
            known = self._known[state] = frozenset(seen & self._kept)
        return known


def _assemble(table: list[list[int]], accepting: list[bool], classes: bytes) -> Automaton | None:
    """Drop states from which nothing is accepted, and put the accepting ones last."""
    sources: list[set[int]] = [set() for _ in table]
    for state, row in enumerate(table):
        for target in row:
            if target >= 0:
                sources[target].add(state)
    alive = [state for state, accepts in enumerate(accepting) if accepts]
    seen = set(alive)
    for state in alive:
        fresh = sources[state] - seen
        seen |= fresh
        alive += fresh
    if 0 not in seen:
        return None
    order = sorted(seen, key=lambda state: (accepting[state], state))
    numbers = {state: i + 1 for i, state in enumerate(order)}
    width = len(table[0])
    rows = array.array("H", bytes(2 * width))
    for state in order:
        rows.extend(numbers.get(target, 0) for target in table[state])
    first = next(numbers[state] for state in order if accepting[state])
    ends = any(not any(target in seen for target in table[state]) for state in order)
    kinds = kinds_of(rows, width, MAX_TOKEN_BYTES)
    return Automaton(len(order) + 1, width, numbers[0], first, not ends, classes, rows.tobytes(), kinds.tobytes())
