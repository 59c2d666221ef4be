"""``grammar_advance`` against a plain loop."""

from __future__ import annotations

import inspect

import pytest
import torch

from headway.core.plan import Finish
from headway.kernels.grammar_advance import grammar_advance
from tests.kernels.grammars import Slots
from tests.kernels.guarded import expect, ints

RING, ROWS = 3, 9


def case(seed: int, ring: int = 1) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Arguments, and what must come out of arguments 5, 8 and 9 (state, alive, results)."""
    made = Slots(seed, 97, num_slots=7)
    rng = made.rng
    slots = [*rng.sample(range(7), 7), -1, 7]
    tokens = [rng.choice([rng.randrange(97), rng.randrange(97), rng.randrange(97), -1, 97]) for _ in slots]
    results = ints([[[rng.randrange(2), 5, rng.randrange(4), 6] for _ in range(ROWS)] for _ in range(RING)])
    alive, state, after = [1] * 7, list(made.state), results.clone()
    for row, slot in enumerate(slots if 0 <= ring < RING else []):
        sampled, finish = bool(results[ring, row, 0]), int(results[ring, row, 2])
        if not (0 <= slot < 7 and made.on[slot] and sampled):
            continue
        broken = finish == Finish.EOS and not made.accepts(slot)
        if finish in (Finish.NONE, Finish.LENGTH):
            state[slot] = made.walk(slot, tokens[row]) if 0 <= tokens[row] < 97 else 0
            broken = state[slot] == 0
        if broken:
            after[ring, row, 2], alive[slot] = int(Finish.NO_TOKEN), 0
    on, info, before, table, vocabulary = made.tables()
    packed = ints([0, 0, 0, 0, 0, ring, 0, 0])
    args = [packed, ints(slots), ints(tokens), on, info, before, table, vocabulary, ints([1] * 7), results]
    return args, {5: ints(state), 8: ints(alive), 9: after}


@pytest.mark.parametrize("seed", range(12))
def test_moves_and_reports(seed: int) -> None:
    args, expected = case(seed)
    expect(grammar_advance, args, expected)


@pytest.mark.parametrize("ring", [-1, 3, 2**31 - 1])
def test_a_ring_index_outside_of_the_ring_writes_nothing(ring: int) -> None:
    args, expected = case(0, ring)
    expect(grammar_advance, args, expected)


def test_the_cases_hold_every_kind_of_row() -> None:
    codes = [int(code) for seed in range(12) for code in case(seed)[1][9][1, :7, 2]]
    assert set(codes) == {int(code) for code in Finish}


def test_the_tokens_are_written_before_anybody_reads_them() -> None:
    """It reads them before it waits: their writer has ended if ``slot_advance`` lets it start behind its own wait."""
    from headway.kernels.slot_advance import triton as before

    source = inspect.getsource(before.slot_advance_kernel.fn)
    places = [source.index(text) for text in ("wait_for_inputs(EARLY)", "start_next(EARLY)", "tl.load(token_ids")]
    assert places == sorted(places)
