"""``grammar_mask`` against a plain loop."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.grammar_mask import BLOCK, RECORD_INTS, RECORDS, grammar_mask, kept_ints
from tests.kernels.grammars import Slots
from tests.kernels.guarded import DEVICE, expect, ints, run

INF = float("inf")


def arguments(made: Slots, slots: list[int], logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = torch.zeros(made.num_slots, kept_ints(made.vocab), dtype=torch.int32)
    stops = (ints(made.stop_counts), ints(made.stop_ids))
    return (logits, ints(slots), *made.tables(), *stops, ints([5 + slot for slot in range(made.num_slots)]), kept)


def forbid(made: Slots, slots: list[int], logits: torch.Tensor) -> torch.Tensor:
    expected = logits.clone()
    for n, slot in enumerate(slots):
        if 0 <= slot < made.num_slots and made.on[slot]:
            for token in range(made.vocab):
                if token in made.eos(slot):
                    allowed = made.accepts(slot)
                else:
                    allowed = made.walk(slot, token) != 0
                if not allowed:
                    expected[n, token] = -INF
    return expected


@pytest.mark.parametrize("vocab", [1, 5, 31, 97, 513, 1031])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_forbids_what_the_automaton_cannot_read(vocab: int, dtype: torch.dtype) -> None:
    slots = [3, -1, 1, 0, 4, 2]
    for seed in range(2):
        made = Slots(seed, vocab)
        logits = torch.randn(len(slots), vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)
        expected = forbid(made, slots, logits)
        expect(grammar_mask, arguments(made, slots, logits), {0: expected})


@pytest.mark.parametrize("programs", [1, 4, 6])
def test_programs_share_the_rows_that_have_a_grammar(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Fewer programs than rows: each takes several, and none is left out or done twice by another's state."""
    monkeypatch.setattr("headway.kernels.grammar_mask.triton.PROGRAMS", programs)
    made, rng = Slots(5, 1031, num_slots=20), random.Random(programs)
    for slots in (rng.sample(range(-1, 20), 19), [7], [-1, -1], list(range(20))):
        logits = torch.zeros(len(slots), 1031)
        expect(grammar_mask, arguments(made, slots, logits), {0: forbid(made, slots, logits)})


def test_something_is_forbidden_and_something_allowed() -> None:
    made = Slots(0, 513)
    after = forbid(made, [0, 2, 3], torch.zeros(3, 513))
    assert 0 < int((after == -INF).sum()) < after.numel()


@pytest.mark.parametrize("state", [-1, 0, 9, 2**31 - 1, -(2**31)])
def test_a_state_outside_of_the_automaton_is_dead(state: int) -> None:
    made = Slots(1, 97)
    args = list(arguments(made, [0, 2], torch.zeros(2, 97)))
    args[4] = ints([state] * 4)
    expect(grammar_mask, args, {0: torch.full((2, 97), -INF)})


def test_numbers_that_lead_out_of_the_table_are_dead() -> None:
    """Classes and transitions from hell: nothing outside of the table is read, nothing crashes."""
    made = Slots(2, 97)
    args = list(arguments(made, [0, 2], torch.zeros(2, 97)))
    made.stop_counts = [[0, 4]] * 4
    args[7] = ints(made.stop_counts)
    for group in (-1, 2**31 - 1, -(2**31), made.automata[0][1]):
        table = args[5].clone()
        table[:, :256] = group
        args[3] = ints([[each[0], min(each[1], max(group, 1)), each[2]] for each in made.automata])
        expect(grammar_mask, [*args[:5], table, *args[6:]], {0: torch.full((2, 97), -INF)})
    table = args[5].clone()
    table[:, 256:] = -1  # every transition leads to state 65535
    expect(grammar_mask, [*args[:5], table, *args[6:]], {0: torch.full((2, 97), -INF)})


def test_lengths_beyond_the_words_are_cut() -> None:
    made = Slots(3, 97)
    args = list(arguments(made, [0], torch.zeros(1, 97)))
    args[6] = args[6].clone()
    args[6][-1] = 2**31 - 1
    made.tokens = [
        b"".join(int(args[6][word, token]).to_bytes(4, "little", signed=True) for word in range(3))
        for token in range(97)
    ]
    expect(grammar_mask, args, {0: forbid(made, [0], torch.zeros(1, 97))})


@pytest.mark.parametrize("records", [2, RECORDS])
def test_what_a_slot_keeps_is_of_a_kind_and_an_automaton(monkeypatch: pytest.MonkeyPatch, records: int) -> None:
    """Masks of a slot that moves, stays, comes back and gets another automaton; and that what is kept is used at all."""
    monkeypatch.setattr("headway.kernels.grammar_mask.triton.RECORDS", records)  # two: kinds share places
    made, slots, size = Slots(6, 1031, num_slots=6), [0, 2, 3, 4, 5], (5, 1031)
    kernel, rng = grammar_mask.implementation("cuda"), random.Random(6)
    args = list(arguments(made, slots, torch.zeros(size)))

    def mask() -> torch.Tensor:
        args[:1], args[4] = [torch.zeros(size)], ints(made.state)
        after, _ = run(grammar_mask, kernel, args, DEVICE)
        args[10] = after[10]
        return after[0]

    for _ in range(6):
        for slot in rng.sample(slots, 3):
            made.state[slot] = rng.randrange(made.automata[slot][0])
        assert torch.equal(mask(), forbid(made, slots, torch.zeros(size)))
    kinds = made.kinds(5)
    first = 1
    second = next(state for state, kind in enumerate(kinds) if kind % records != kinds[first] % records)
    for state in (first, second):
        made.state[5] = state
        assert torch.equal(mask(), forbid(made, slots, torch.zeros(size)))
    made.state[5] = first
    kept = args[10].view(6, RECORDS, -1, RECORD_INTS)
    kept[5, kinds[first] % records, :, 2:] = -1  # as if every token could be read
    kept[3, :, :, 2:] = -1
    args[9] = args[9].clone()
    args[9][3] += 100
    expected = forbid(made, slots, torch.zeros(size))
    expected[4] = torch.where(expected[4] == -INF, 0.0, expected[4])
    for token in made.eos(5):
        expected[4, token] = 0.0 if made.accepts(5) else -INF
    assert kept.shape[2] == -(-1031 // BLOCK) and torch.equal(mask(), expected)
