"""Rows of drafts: ``step_unpack`` reads them, ``slot_advance`` and ``grammar_advance`` take outcome by outcome."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.core.plan import Finish
from headway.kernels.slot_advance import slot_advance
from headway.kernels.step_unpack import step_unpack
from tests.kernels import test_slot_advance, test_step_unpack
from tests.kernels.guarded import expect, ints, run_both

S, V = test_slot_advance.S, test_slot_advance.V
POISON = -(2**31)


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_follow_the_known_tokens(seed: int, width: int) -> None:
    """Rows of drafts, of one outcome and of none; a zombie; drafts beyond what a slot has room for; padding."""
    rng = random.Random(seed)
    slots = rng.sample(range(test_step_unpack.S), 5)
    rows = [(slot, width, width) for slot in slots[:2]] + [(slots[2], 1, 1), (slots[3], 9, 1), (slots[4], 4, 0)]
    total, num_rows = sum(row[1] for row in rows), len(rows) + rng.randrange(2)
    inputs = test_step_unpack._inputs(rows, seed)
    packed, history, num_computed, alive, tables = inputs
    num_tokens = num_computed + 9  # of prompts
    num_tokens[slots[:2]] = num_computed[slots[:2]] + 1
    drafts = ints([[1000 + 10 * slot + k for k in range(width - 1)] for slot in range(test_step_unpack.S)])
    room = total + 3
    outputs = test_step_unpack._oracle(inputs, room, num_rows)
    ids, query_start = outputs[5], outputs[8].tolist()
    sources = [[0] * num_rows for _ in range(width)]
    for r, (slot, query_len, outcomes) in enumerate(rows):
        first = query_start[r]
        for w in range(width):
            sources[w][r] = first + (min(w, query_len - 1) if outcomes > 1 else query_len - 1)
        if outcomes > 1 and alive[slot]:
            ids[first + 1 : first + width] = drafts[slot]
    outputs[11] = ints([each for row in sources for each in row])
    sizes = (room, room, room, num_rows + 1, num_rows, num_rows, width * num_rows)
    poison = [torch.full((n,), POISON, dtype=torch.int32) for n in sizes]
    args = (packed, history, num_computed, alive, tables, *poison, test_step_unpack.BS, 9, num_tokens, drafts)
    expect(step_unpack, args, outputs)


def advance_run(state: dict[str, Any], tokens: torch.Tensor, drafts: torch.Tensor) -> list[list[torch.Tensor]]:
    """All outcomes of a step by each implementation: the arguments afterwards. ``tokens``: [R, W]."""
    found = []
    for which in range(2):
        args: list[Any] = [state[name].clone() for name in test_slot_advance.NAMES]
        slots = args[1].clone()
        for offset in range(tokens.shape[1]):
            after = torch.full_like(slots, POISON)
            step = [args[0], slots, tokens[:, offset].contiguous(), *args[3:], drafts, after, offset]
            done = run_both(slot_advance, step)
            changed = done[which % len(done)][0]
            args[3:], slots = [*changed[3:14]], changed[15]
        found.append(args)
    return found


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_a_run_is_as_many_single_steps(seed: int, width: int) -> None:
    """Tokens, counts, stops, lengths, history: as if each accepted token had been a step of its own."""
    rng = random.Random(seed)
    slots = rng.sample(range(S), 5)
    rows = [(slot, width, width) for slot in slots[:3]] + [(slots[3], 4, 1), (slots[4], 3, 0)]
    state = test_slot_advance._state(rows, [0] * 5, pads=1, seed=seed)
    state["results"] = torch.full((test_slot_advance.K, 7, 3 + width), -7, dtype=torch.int32)
    tokens = ints([[rng.randrange(V) for _ in range(width)] for _ in range(6)])
    drafts = ints([[rng.randrange(V) for _ in range(width - 1)] for _ in range(S)])
    for r, slot in enumerate(slots[:3]):
        for k in range(width - 1):
            drafts[slot, k] = tokens[r, k] if rng.random() < 0.8 else (int(tokens[r, k]) + 1) % V
    single = {name: state[name].clone() for name in test_slot_advance.NAMES}
    single["results"] = torch.zeros(test_slot_advance.K, 7, 4, dtype=torch.int32)
    records = [[0] * (3 + width) for _ in range(6)]
    going = [True] * 6
    for offset in range(width):
        now = {**single, "packed": single["packed"].clone(), "token_ids": tokens[:, offset].contiguous()}
        now["row_slots"] = ints([slot if on else -1 for slot, on in zip(single["row_slots"].tolist(), going)])
        for r, (_, query_len, outcomes) in enumerate(rows):
            now["packed"][17 + 4 * r] = 1 if outcomes > 1 else query_len
        single = {**test_slot_advance._oracle(now), "packed": single["packed"], "row_slots": single["row_slots"]}
        for r in range(6):
            sampled, token, finish, total = single["results"][1, r].tolist()
            if offset == 0:
                records[r][:4] = [sampled, token, finish, total]
            elif going[r]:
                records[r][0], records[r][2], records[r][3], records[r][3 + offset] = offset + 1, finish, total, token
            runs = r < 3 and sampled and finish == Finish.NONE and offset + 1 < width
            going[r] = bool(going[r] and runs and int(drafts[rows[r][0], offset]) == int(tokens[r, offset]))
    for args in advance_run(state, tokens, drafts):
        for name, found in zip(test_slot_advance.NAMES[3:13], args[3:13], strict=True):
            assert torch.equal(found, single[name]), name
        for r, record in enumerate(records):
            used = 4 if record[0] < 2 else 3 + record[0]
            assert args[13][1, r, :used].tolist() == record[:used], f"row {r}"
        assert (args[13][0] == -7).all() and (args[13][1, 6] == -7).all()


def test_rows_of_one_token_need_no_drafts_where_others_may_have_some() -> None:
    """A step without drafts, in an engine whose records have room for some."""
    state = test_slot_advance._state([(2, 1, 1), (0, 3, 0)], [4, 4])
    expected = test_slot_advance._oracle(state)
    state["results"] = torch.full((test_slot_advance.K, 3, 7), -7, dtype=torch.int32)
    wide = state["results"].clone()
    wide[1, :2, :4] = expected["results"][1, :2]
    names = test_slot_advance.NAMES
    outputs = {i: wide if name == "results" else expected[name] for i, name in enumerate(names)}
    expect(slot_advance, [state[name] for name in names], outputs)
