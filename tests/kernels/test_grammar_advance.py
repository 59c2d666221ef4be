"""``grammar_advance`` against a plain loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.core.automaton import CLASS_INTS
from headway.core.plan import Finish
from headway.kernels.grammar_advance import grammar_advance
from tests.kernels import test_slot_advance
from tests.kernels.grammars import WORDS, Slots
from tests.kernels.guarded import expect, ints
from tests.kernels.test_slot_advance import K, S, V

GRAMMAR = ("grammar_on", "grammar_info", "grammar_state", "grammar_table", "vocabulary")
NAMES = (*test_slot_advance.NAMES[:-1], *GRAMMAR, "results")


def case(seed: int, ring: int = 1) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Arguments, and what they must be afterwards."""
    made, rng = Slots(seed, V, num_slots=S), random.Random(seed)
    rows = [(slot, 1, int(rng.random() < 0.8)) for slot in rng.sample(range(S), S)]
    tokens = [rng.choice([rng.randrange(V), rng.randrange(V), rng.randrange(V), -1, V]) for _ in rows]
    state: dict[str, Any] = test_slot_advance._state(rows, tokens, ring=ring, pads=2, seed=seed)
    state["num_tokens"] = ints([rng.randrange(1, 6) for _ in range(S)])  # most are not at their end
    state |= zip(GRAMMAR, made.tables(), strict=True)
    after = {name: value.clone() for name, value in state.items()} | test_slot_advance._oracle(state)
    for row, (slot, _, _) in enumerate(rows if 0 <= ring < K else []):
        sampled, _, finish, _ = after["results"][ring, row].tolist()
        if not (made.on[slot] and sampled):
            continue
        broken = finish == Finish.EOS and not made.accepts(slot)
        if finish in (Finish.NONE, Finish.LENGTH):
            moved = made.walk(slot, tokens[row]) if 0 <= tokens[row] < V else 0
            after["grammar_state"][slot], broken = moved, moved == 0
        if broken:
            after["results"][ring, row, 2], after["alive"][slot] = int(Finish.NO_TOKEN), 0
    return [state[name] for name in NAMES], after


@pytest.mark.parametrize("seed", range(24))
def test_moves_and_reports(seed: int) -> None:
    args, expected = case(seed)
    expect(grammar_advance, args, {i: expected[name] for i, name in enumerate(NAMES)})


@pytest.mark.parametrize("ring", [-1, 3, 2**31 - 1])
def test_a_ring_index_outside_of_the_ring_writes_nothing(ring: int) -> None:
    args, expected = case(0, ring)
    expect(grammar_advance, args, {i: expected[name] for i, name in enumerate(NAMES)})


@pytest.mark.parametrize("length", range(4 * WORDS + 1))
def test_every_byte_of_a_token_is_read(length: int) -> None:
    """The automaton counts bytes: state n leads to n + 1."""
    args, _ = case(3)
    tables = dict(zip(NAMES, args, strict=True))
    slot, last = int(tables["row_slots"][0]), 4 * WORDS + 1
    following = [0, *range(2, last + 2), 0, 0][: last + 1]
    tables["grammar_table"][slot, :CLASS_INTS] = 0
    pairs = [low | high << 16 for low, high in zip(following[::2], following[1::2], strict=True)]
    tables["grammar_table"][slot, CLASS_INTS : CLASS_INTS + len(pairs)] = ints(pairs)
    tables["grammar_info"][slot] = ints([last + 1, 1, 1])
    tables["grammar_on"][:] = 0
    tables["grammar_on"][slot] = tables["grammar_state"][slot] = tables["alive"][slot] = tables["num_tokens"][slot] = 1
    tables["packed"][19] = 1  # it samples
    tables["stop_counts"][slot] = 0
    tables["token_ids"][0] = 5
    tables["vocabulary"][-1, 5] = length
    moved = tables["grammar_state"].clone()
    moved[slot] = length + 1 if length else 0
    expect(grammar_advance, args, {NAMES.index("grammar_state"): moved})


def test_the_cases_hold_every_kind_of_row() -> None:
    codes = [int(code) for seed in range(24) for code in case(seed)[1]["results"][1, :S, 2]]
    assert set(codes) == {int(code) for code in Finish}
