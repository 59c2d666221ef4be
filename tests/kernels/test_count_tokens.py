"""``count_tokens`` against a plain loop."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.count_tokens import count_tokens
from tests.kernels.guarded import expect, ints

S, L = 6, 90
"""With an odd vocabulary every other slot's counts start in the middle of a 32-bit word."""


def _oracle(
    counts: torch.Tensor, slots: list[int], history: torch.Tensor, prompt: list[int], known: list[int]
) -> torch.Tensor:
    expected, vocab = counts.clone(), counts.shape[1]
    for slot in slots:
        if not 0 <= slot < S:
            continue
        row = [0] * vocab
        for position, token in enumerate(history[slot].tolist()[: known[slot]]):
            if 0 <= token < vocab:
                if position < prompt[slot]:
                    row[token] |= 1 << 15
                elif row[token] & 32767 < 32767:
                    row[token] += 1
        expected[slot] = torch.tensor([n - (1 << 16) if n >> 15 else n for n in row], dtype=torch.int16)
    return expected


@pytest.mark.parametrize("vocab", [5, 97, 1031, 5000])
@pytest.mark.parametrize("slots", [[0, 3, 4], [-1, 2, S, 1], [2, 2], [], [-(2**31)]])
def test_rebuilds_the_listed_rows(vocab: int, slots: list[int]) -> None:
    rng = random.Random(vocab)
    history = ints(
        [[rng.choice([-1, vocab, 2**31 - 1, *range(min(vocab, 9)), vocab - 1]) for _ in range(L)] for _ in range(S)]
    )
    counts = torch.full((S, vocab), 123, dtype=torch.int16)
    prompt, known = [0, 7, 30, 90, 12, 40], [50, 7, 31, 90, 0, 20]
    expected = _oracle(counts, slots, history, prompt, known)
    args = (counts, torch.tensor(slots, dtype=torch.int32), history, ints(prompt), ints(known), L)
    expect(count_tokens, args, {0: expected})


def test_an_odd_number_of_counts() -> None:
    """The last count has no whole word to be added in."""
    history = ints([[0, 1, 2, 2, 2], [1, 1, 2, 2, 0], [2, 2, 2, 0, 1]])
    args = (torch.zeros(3, 3, dtype=torch.int16), ints([2, 0]), history, ints([1, 5, 1]), ints([5, 5, 3]), 5)
    expected = [[-32768, 1, 3], [0, 0, 0], [0, 0, 2 - 32768]]
    expect(count_tokens, args, {0: torch.tensor(expected, dtype=torch.int16)})


def test_counts_saturate_and_the_prompt_bit_stays() -> None:
    history = torch.ones(1, 33000, dtype=torch.int32)
    history[0, 0] = 2
    args = (torch.zeros(1, 4, dtype=torch.int16), ints([0]), history, ints([2]), ints([33000]), 33000)
    expect(count_tokens, args, {0: torch.tensor([[0, -1, -32768, 0]], dtype=torch.int16)})


def test_num_tokens_beyond_the_history_reads_nothing_outside() -> None:
    history = torch.zeros(2, 8, dtype=torch.int32)
    args = (torch.zeros(2, 3, dtype=torch.int16), ints([0, 1]), history, ints([1, 0]), ints([2**31 - 1, 9]), 2**31 - 1)
    expect(count_tokens, args, {0: torch.tensor([[7 - 32768, 0, 0], [8, 0, 0]], dtype=torch.int16)})
