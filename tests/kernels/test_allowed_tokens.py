"""``allowed_tokens`` against a plain loop."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.allowed_tokens import allowed_tokens
from headway.kernels.testing import kernel_dtypes
from tests.kernels.guarded import expect, ints


@pytest.mark.parametrize("vocab", [5, 32, 97, 1031, 5000])
def test_forbids_what_is_not_listed(vocab: int) -> None:
    rng, S = random.Random(vocab), 4
    words = -(-vocab // 32)
    slots, on = [3, -1, 1, 0, S, 2], [1, 0, 1, 1]
    bits = [[rng.randrange(2**32) for _ in range(words)] for _ in range(S)]
    bits[1] = [0] * words
    logits = torch.randn(len(slots), vocab)
    logits[0, 0], logits[1, 1] = float("nan"), float("nan")
    expected = logits.clone()
    for n, slot in enumerate(slots):
        if 0 <= slot < S and on[slot]:
            for token in range(vocab):
                if not bits[slot][token // 32] >> (token % 32) & 1:
                    expected[n, token] = float("-inf")
    table = ints([[word - 2**32 if word >> 31 else word for word in row] for row in bits])
    for dtype in kernel_dtypes():
        args = (logits.to(dtype), ints(slots), ints(on), table if words > 1 else table.view(-1))
        expect(allowed_tokens, args, {0: expected.to(dtype)})
