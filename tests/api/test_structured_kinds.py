"""``kinds_of`` against its definition, and on grammars that count."""

from __future__ import annotations

import array
import json
import random
from itertools import product

import pytest

from headway.api.structured.compile import Task, compile_task
from headway.api.structured.kinds import kinds_of
from headway.core.automaton import MAX_TOKEN_BYTES, Automaton


def _readable(rows: list[list[int]], state: int, depth: int) -> frozenset[tuple[int, ...]]:
    """Texts of up to ``depth`` classes that do not lead to the dead state."""
    found = set()
    for length in range(depth + 1):
        for text in product(range(len(rows[0])), repeat=length):
            at = state
            for class_ in text:
                at = rows[at][class_]
            if at:
                found.add(text)
    return frozenset(found)


@pytest.mark.parametrize("seed", range(40))
def test_states_of_a_kind_read_the_same_texts_and_no_others_do(seed: int) -> None:
    rng = random.Random(seed)
    states, width, depth = rng.randrange(2, 12), rng.randrange(1, 4), rng.randrange(0, 5)
    dead = rng.choice([0.1, 0.4])
    rows = [[0] * width]
    for _ in range(states - 1):
        rows.append([0 if rng.random() < dead else rng.randrange(1, states) for _ in range(width)])
    kinds = kinds_of(array.array("H", (target for row in rows for target in row)), width, depth).tolist()
    readable = [_readable(rows, state, depth) for state in range(states)]
    for a, b in product(range(states), repeat=2):
        assert (kinds[a] == kinds[b]) == (readable[a] == readable[b]), (a, b)
    counts = [kinds.count(kind) for kind in range(1, len(set(kinds)))]
    assert kinds[0] == 0 and set(kinds) == set(range(len(set(kinds)))) and counts == sorted(counts, reverse=True)


def _compiled(schema: dict[str, object]) -> Automaton:
    automaton = compile_task(Task("json", json.dumps(schema), bytes(range(256)))).automaton
    assert automaton is not None
    automaton.check()
    return automaton


def test_an_array_has_the_same_kinds_at_each_of_its_places() -> None:
    """A text of as many bytes as a token can have tells two states apart only near the array's least length."""
    automaton = _compiled({"type": "array", "items": {"type": "integer"}, "minItems": 300})
    kinds = memoryview(automaton.kinds).cast("H").tolist()
    state, met = automaton.start, set()
    for place in range(200):
        for byte in (b"[" if place == 0 else b"") + b"%d, " % (place * 7919):
            state = automaton.walk(state, bytes([byte]))
            met.add(kinds[state])
    assert automaton.num_states > 5000 and len(met) <= 20 and max(met) < 32
    assert automaton.walk(automaton.start, b"[1" * MAX_TOKEN_BYTES) == 0
