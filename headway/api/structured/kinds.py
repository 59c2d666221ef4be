"""Which states of an automaton can read the same tokens, though they differ in what may come long after them.

An array of at least 300 numbers has 300 states in the middle of a number, one for each number's place. As long as the 300th is
further away than a token is long, all of them can read the same tokens, so one mask serves them all.
"""

from __future__ import annotations

import array
from collections import Counter

from headway.core.automaton import DEAD


def kinds_of(transitions: array.array[int], width: int, depth: int) -> array.array[int]:
    """uint16 [states]: states of one kind can read the same texts of up to ``depth`` bytes. The dead state's kind is 0, the
    most common one 1, and so on.

    Args:
        transitions: uint16 [states, width], the next states; state 0 is dead.

    Partition refinement (Moore 1956) that stops at ``depth``; each round looks only at states before those that the last one
    moved to another kind.
    """
    num_states = len(transitions) // width
    rows = [transitions[state * width : (state + 1) * width] for state in range(num_states)]
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in set(row):
            sources[target].append(state)
    kind, sizes, moved = [0] + [1] * (num_states - 1), [1, num_states - 1], [DEAD]
    for _ in range(depth):
        parts: dict[tuple[int, ...], list[int]] = {}
        for state in {source for target in moved for source in sources[target]} - {DEAD}:
            parts.setdefault((kind[state], *[kind[target] for target in rows[state]]), []).append(state)
        split: dict[int, list[list[int]]] = {}
        for (old, *_), part in parts.items():
            split.setdefault(old, []).append(part)
        moved = []
        for old, found in split.items():
            if sum(map(len, found)) == sizes[old]:  # nobody else is left to keep the number
                found.remove(max(found, key=len))
            for part in found:
                for state in part:
                    kind[state] = len(sizes)
                sizes[old] -= len(part)
                sizes.append(len(part))
                moved += part
        if not moved:
            break
    common = [number for number, _ in Counter(kind[1:]).most_common()]
    places = {number: place for place, number in enumerate([kind[DEAD], *common])}
    return array.array("H", (places[number] for number in kind))
