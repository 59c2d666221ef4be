"""``min_tokens`` against a plain loop, and its boundary with the stop conditions of ``slot_advance``."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.min_tokens import min_tokens
from headway.kernels.testing import kernel_dtypes
from tests.kernels.guarded import expect, ints


@pytest.mark.parametrize("vocab", [5, 97, 1031])
@pytest.mark.parametrize("width", [1, 7, 80])
def test_forbids_stop_ids_until_the_minimum(vocab: int, width: int) -> None:
    rng, S = random.Random(vocab), 5
    slots = [4, -1, 0, 1, 2, S, 3]
    known, least = [5, 6, 7, 0, 3], [6, 6, 6, 0, 99]
    ids = [[rng.choice([rng.randrange(vocab), -1, vocab, 2**31 - 1]) for _ in range(width)] for _ in range(S)]
    counts = [[0, rng.randrange(width + 1)] for _ in range(S)]
    counts[0] = [1, width]
    counts[4] = [0, 10**6]  # nonsense is cut at the table
    logits = torch.randn(len(slots), vocab)
    expected = logits.clone()
    for n, slot in enumerate(slots):
        if 0 <= slot < S and known[slot] < least[slot]:
            for token in ids[slot][: counts[slot][1]]:
                if 0 <= token < vocab:
                    expected[n, token] = float("-inf")
    table = ints(ids) if width > 1 else ints(ids).view(-1)
    for dtype in kernel_dtypes():
        args = (logits.to(dtype), ints(slots), ints(known), ints(least), ints(counts), table)
        expect(min_tokens, args, {0: expected.to(dtype)})


def test_the_boundary() -> None:
    """Prompt 3, min_tokens 2: the first two generated tokens may not stop, the third may."""
    for known, forbidden in ((3, True), (4, True), (5, False)):
        logits = torch.zeros(1, 4)
        expected = logits.clone()
        if forbidden:
            expected[0, 2] = float("-inf")
        expect(min_tokens, (logits, ints([0]), ints([known]), ints([5]), ints([[1, 1]]), ints([[2, 3]])), {0: expected})
