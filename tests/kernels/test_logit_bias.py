"""``logit_bias`` against a plain loop."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.logit_bias import logit_bias
from tests.kernels.guarded import expect, floats, ints


@pytest.mark.parametrize("vocab", [5, 97, 1031])
@pytest.mark.parametrize("width", [1, 6, 1024])
def test_adds_the_biases_in_use(vocab: int, width: int) -> None:
    rng, S = random.Random(vocab), 4
    slots = [2, -1, 0, 3, S]
    logits = torch.randn(len(slots), vocab)
    logits[0, 0], logits[0, 1], logits[2, 1] = float("-inf"), float("inf"), float("nan")
    ids = [[rng.choice([*rng.sample(range(vocab), 1), -1, vocab, 2**31 - 1]) for _ in range(width)] for _ in range(S)]
    distinct = [rng.sample(range(vocab), min(vocab, width)) for _ in range(S)]
    for slot in (0, 2):
        ids[slot][: len(distinct[slot])] = distinct[slot]
    values = [[rng.uniform(-100, 100) for _ in range(width)] for _ in range(S)]
    counts = [min(width, vocab), 0, min(width, vocab) // 2, 0]
    expected = logits.clone()
    for n, slot in enumerate(slots):
        if 0 <= slot < S:
            for token, value in list(zip(ids[slot], values[slot], strict=True))[: counts[slot]]:
                if 0 <= token < vocab:
                    expected[n, token] += floats(value)
    bias_ids = ints(ids) if width > 1 else ints(ids).view(-1)
    expect(
        logit_bias, (logits, ints(slots), ints(counts), bias_ids, floats(values).view(bias_ids.shape)), {0: expected}
    )


@pytest.mark.parametrize("token", [-1, 5, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_dropped(token: int) -> None:
    logits = torch.zeros(2, 5)
    args = (logits, ints([0, 0]), ints([2]), ints([[token, 3]]), floats([[9.0, 1.0]]))
    expected = logits.clone()
    expected[:, 3] = 1.0
    expect(logit_bias, args, {0: expected})


def test_a_count_beyond_the_table_is_cut() -> None:
    args = (torch.zeros(1, 5), ints([0]), ints([10**6]), ints([[0, 3]]), floats([[9.0, 1.0]]))
    expect(logit_bias, args, {0: floats([[9.0, 0, 0, 1.0, 0]])})
