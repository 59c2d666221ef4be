"""``slot_advance`` against a plain loop: appends, stop conditions and their order, zombies, padding, saturation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.core.plan import Finish
from headway.kernels.slot_advance import slot_advance
from tests.kernels.guarded import expect, ints

S, L, V, C, K = 7, 12, 11, 5, 3
NAMES = (
    "packed", "row_slots", "token_ids", "history", "num_tokens", "num_computed", "alive", "counts", "count_on",
    "min_total", "max_total", "stop_counts", "stop_ids", "results",
)  # fmt: skip


def _state(
    rows: list[tuple[int, int, int]], tokens: list[int], *, ring: int = 1, pads: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Rows are (slot, query_len, samples)."""
    rng = random.Random(seed)
    records = [number for slot, query_len, samples in rows for number in (slot, query_len, 0, samples)]
    num_rows = len(rows) + pads
    return {
        "packed": ints([0, 0, len(rows), 0, 16, ring] + [0] * 10 + records),
        "row_slots": ints([slot if 0 <= slot < S else -1 for slot, _, _ in rows] + [-1] * pads),
        "token_ids": ints([*tokens, *[3] * pads]),
        "history": ints([[rng.randrange(V) for _ in range(L)] for _ in range(S)]),
        "num_tokens": ints([rng.randrange(1, L) for _ in range(S)]),
        "num_computed": ints([rng.randrange(0, L) for _ in range(S)]),
        "alive": ints([1, 1, 1, 1, 0, 1, 1]),
        "counts": torch.tensor(
            [[rng.choice([0, 1, -32768, 32767, -1, 5]) for _ in range(V)] for _ in range(S)], dtype=torch.int16
        ),
        "count_on": ints([rng.randrange(2) for _ in range(S)]),
        "min_total": ints([rng.randrange(L) for _ in range(S)]),
        "max_total": ints([rng.randrange(2, L + 3) for _ in range(S)]),
        "stop_counts": ints([sorted((rng.randrange(C + 1), rng.randrange(C + 1))) for _ in range(S)]),
        "stop_ids": ints([[rng.randrange(V) for _ in range(C)] for _ in range(S)]),
        "results": torch.full((K, num_rows + 1, 4), -7, dtype=torch.int32),
    }


def _oracle(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    out = {name: state[name].clone() for name in NAMES}
    packed = state["packed"].tolist()
    ring = packed[5]
    for r, slot in enumerate(state["row_slots"].tolist()):
        result = [0, 0, 0, 0]
        if slot >= 0 and state["alive"][slot]:
            query_len, samples = packed[17 + 4 * r], packed[19 + 4 * r]
            out["num_computed"][slot] += query_len
            total = int(state["num_tokens"][slot])
            result = [0, 0, 0, total]
            if samples:
                token, finish = int(state["token_ids"][r]), Finish.NONE
                if 0 <= token < V and state["count_on"][slot] and int(state["counts"][slot, token]) & 32767 != 32767:
                    out["counts"][slot, token] += 1
                if total + 1 >= min(int(state["max_total"][slot]), L):
                    finish = Finish.LENGTH
                eos, stops = state["stop_counts"][slot].tolist()
                listed = state["stop_ids"][slot].tolist()
                if total >= state["min_total"][slot]:
                    if token in listed[:stops]:
                        finish = Finish.EOS if token in listed[:eos] else Finish.STOP_TOKEN
                if token < 0:
                    token, finish = 0, Finish.NO_TOKEN
                if total < L:
                    out["history"][slot, total] = token
                out["num_tokens"][slot] = total + 1
                out["alive"][slot] = 0 if finish else 1
                result = [1, token, finish, total + 1]
        if 0 <= ring < K:
            out["results"][ring, r] = ints(result)
    return out


def _check(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    expected = _oracle(state)
    expect(slot_advance, [state[name] for name in NAMES], {i: expected[name] for i, name in enumerate(NAMES)})
    return expected


@pytest.mark.parametrize("seed", range(25))
def test_random_states(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(S), rng.randrange(1, S + 1))
    rows = [(slot, rng.choice([1, 1, 4]), rng.randrange(4) > 0) for slot in slots]
    tokens = [rng.choice([*range(V), -1, V, 2**31 - 1]) for _ in rows]
    _check(
        _state([(a, b, int(c)) for a, b, c in rows], tokens, ring=rng.randrange(K), pads=rng.randrange(3), seed=seed)
    )


def _one(token: int, *, before: int, min_total: int, max_total: int, stops: tuple[int, int], ids: list[int]) -> int:
    state = _state([(2, 1, 1)], [token])
    state["num_tokens"][2], state["min_total"][2], state["max_total"][2] = before, min_total, max_total
    state["stop_counts"][2], state["stop_ids"][2] = ints(stops), ints(ids)
    return int(_check(state)["results"][1, 0, 2])


@pytest.mark.parametrize(
    ("before", "min_total", "max_total", "stops", "finish"),
    [
        (5, 5, 12, (1, 2), Finish.EOS),  # min_tokens just reached: the stop counts
        (4, 5, 12, (1, 2), Finish.NONE),  # one token early
        (4, 5, 5, (1, 2), Finish.LENGTH),  # too early to stop, but out of length
        (5, 0, 6, (1, 2), Finish.EOS),  # EOS wins over the length
        (5, 0, 6, (0, 1), Finish.STOP_TOKEN),  # and so does a stop token
        (5, 0, 12, (1, 5), Finish.EOS),  # listed in both: EOS
        (5, 0, 12, (0, 0), Finish.NONE),  # ids past the count are stale
        (5, 0, 6, (0, 0), Finish.LENGTH),
        (11, 0, 99, (0, 0), Finish.LENGTH),  # the history is full whatever max_total says
    ],
)
def test_finish_codes(before: int, min_total: int, max_total: int, stops: tuple[int, int], finish: Finish) -> None:
    assert _one(7, before=before, min_total=min_total, max_total=max_total, stops=stops, ids=[7, 7, 1, 7, 7]) == finish


@pytest.mark.parametrize("ring", [-1, K, 2**31 - 1, -(2**31)])
def test_a_ring_index_outside_writes_no_result(ring: int) -> None:
    _check(_state([(0, 1, 1), (5, 2, 0)], [4, 4], ring=ring))


def test_a_full_history_is_not_overrun() -> None:
    state = _state([(6, 1, 1)], [4])
    state["num_tokens"][6] = L
    assert _check(state)["results"][1, 0].tolist()[2] != 0


def test_one_stop_id_per_slot_is_a_flat_table() -> None:
    state = _state([(1, 1, 1)], [4])
    state["stop_ids"] = torch.full((S,), 4, dtype=torch.int32)
    state["stop_counts"][1], state["min_total"][1] = ints([0, 1]), 0
    for i in range(1):
        wide = {**state, "stop_ids": state["stop_ids"].view(S, 1)}
        expected = _oracle(wide)
        expect(slot_advance, [state[name] for name in NAMES], {13: expected["results"]})
        assert int(expected["results"][1, i, 2]) == Finish.STOP_TOKEN
