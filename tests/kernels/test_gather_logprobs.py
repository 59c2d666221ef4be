"""``gather_logprobs`` against plain Python: order and ties, ranks, listed ids, rows that did not ask."""

from __future__ import annotations

import math
import random

import pytest
import torch

from headway.kernels.gather_logprobs import gather_logprobs
from headway.kernels.testing import kernel_dtypes
from tests.kernels.guarded import ints, run_both

INF = float("inf")
Case = tuple[torch.Tensor, list[int], list[int], list[int], list[int], list[list[int]], int]


def _oracle(case: Case) -> list[tuple[list[int], list[float], int]]:
    """Per row: ids, log-probabilities, rank; empty when the row did not ask."""
    logits, tokens, slots, wanted, listed, table, most = case
    out: list[tuple[list[int], list[float], int]] = []
    for n, slot in enumerate(slots):
        if not 0 <= slot < len(wanted) or (wanted[slot] < 0 and listed[slot] <= 0):
            out.append(([], [], 0))
            continue
        x = [-INF if math.isnan(value) else value for value in logits[n].float().tolist()]
        order = sorted(range(len(x)), key=lambda i: (-x[i], i))
        entries = table[slot][: min(listed[slot], most)] if listed[slot] > 0 else order[: min(wanted[slot], most)]
        top = max(x)
        mass = sum(1.0 if value == top else math.exp(value - top) for value in x)
        ids, logprobs = [], []
        for token in [tokens[n], *entries]:
            inside = 0 <= token < len(x)
            value = x[token] if inside else -INF
            ids.append(token if inside else 0)
            logprobs.append(-INF if value == -INF else (0.0 if value == top else value - top) - math.log(mass))
        chosen = x[tokens[n]] if 0 <= tokens[n] < len(x) else -INF
        out.append((ids, logprobs, sum(value >= chosen for value in x)))
    return out


def _check(case: Case) -> None:
    logits, tokens, slots, wanted, listed, table, most = case
    args = (logits, ints(tokens), ints(slots), ints(wanted), ints(listed), ints(table), most)
    for name, (_, (ids, logprobs, ranks, counts)) in zip(
        ("reference", "kernel"), run_both(gather_logprobs, args), strict=True
    ):
        assert ids.shape == logprobs.shape == (len(slots), 1 + most)
        assert [t.dtype for t in (ids, logprobs, ranks, counts)] == [
            torch.int32,
            torch.float32,
            torch.int32,
            torch.int32,
        ]
        for n, (want_ids, want_logprobs, rank) in enumerate(_oracle(case)):
            where = f"{name} row {n}"
            count = len(want_ids)
            assert int(counts[n]) == count, where
            assert int(ranks[n]) == rank, where
            assert ids[n].tolist() == want_ids + [0] * (1 + most - count), where
            assert logprobs[n, :count].tolist() == pytest.approx(want_logprobs, rel=2e-5, abs=2e-5), where
            assert (logprobs[n, count:] == 0).all(), where


def _case(vocab: int, most: int, seed: int, dtype: torch.dtype = torch.float32) -> Case:
    rng, S, width = random.Random(seed), 6, 9
    torch.manual_seed(seed)
    slots = [3, -1, 0, 1, S, 2, 5, 4]
    logits = ((torch.randn(len(slots), vocab) * 12).round() / 4).to(dtype)  # many ties
    logits[0, rng.randrange(vocab)] = -INF
    logits[2, rng.randrange(vocab)] = float("nan")
    tokens = [rng.randrange(vocab) for _ in slots]
    table = [[rng.choice([rng.randrange(vocab), -1, vocab, 2**31 - 1]) for _ in range(width)] for _ in range(S)]
    return logits, tokens, slots, [most, 0, most // 2, 3, -1, 10**6], [0, 0, 0, 4, 0, 0], table, most


@pytest.mark.parametrize("vocab", [5, 97, 1031, 9000])
@pytest.mark.parametrize("most", [0, 1, 5, 20, 32])
def test_random_rows(vocab: int, most: int) -> None:
    _check(_case(vocab, most, vocab + most))


@pytest.mark.parametrize("vocab", [5, 97, 1031])
@pytest.mark.parametrize("most", [33, 130])
def test_long_lists_are_sorted(vocab: int, most: int) -> None:
    _check(_case(vocab, most, vocab + most))


@pytest.mark.parametrize("dtype", kernel_dtypes())
def test_dtypes(dtype: torch.dtype) -> None:
    _check(_case(331, 8, 1, dtype))


def test_infinite_logits() -> None:
    logits = torch.full((4, 70), -INF)
    logits[1, 7] = INF
    logits[2, [3, 60]] = INF
    logits[2, 5] = 1.0
    logits[3] = -0.0
    logits[3, 60] = 0.0
    _check((logits, [4, 7, 60, 69], [0, 1, 2, 3], [3, 3, 3, 3], [0] * 4, [[0]] * 4, 3))


@pytest.mark.parametrize("token", [-1, 70, 2**31 - 1, -(2**31)])
def test_a_chosen_token_outside_the_vocabulary(token: int) -> None:
    _check((torch.randn(2, 70), [token, 3], [0, 1], [2, 2], [0, 0], [[0], [0]], 2))


def test_more_listed_ids_than_the_table_holds() -> None:
    _check((torch.randn(2, 70), [1, 3], [0, 1], [-1, 2], [2, 2], [[5, 6], [9, 8]], 6))
    _check((torch.randn(2, 70), [1, 3], [0, 1], [-1, 2], [2, 2], [[5, 6], [9, 8]], 1))


def test_meta_gives_shapes() -> None:
    args = [ints([0] * 3).to("meta") for _ in range(4)]
    ids, logprobs, ranks, counts = gather_logprobs(
        torch.empty(3, 9, device="meta"), args[0], args[1], args[2], args[3], ints([[0]] * 3).to("meta"), 5
    )
    assert ids.shape == logprobs.shape == (3, 6) and ranks.shape == counts.shape == (3,)
    assert logprobs.dtype == torch.float32 and ids.dtype == ranks.dtype == counts.dtype == torch.int32
