"""``penalties`` against a plain loop."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.penalties import penalties
from tests.kernels.guarded import floats, ints, run_both


@pytest.mark.parametrize("vocab", [5, 97, 1031, 5000])
def test_follows_the_formula(vocab: int) -> None:
    rng, S = random.Random(vocab), 5
    slots = [3, -1, 0, 1, S, 2, 4]
    on = [1, 1, 0, 1, 1]
    r, f, p = [1.3, 0.5, 1.5, 1.0, 1.0], [0.5, -2.0, 0.5, 0.25, 0.0], [0.0, 2.0, 0.5, -1.5, 0.0]
    counts = [[rng.choice([0, 0, 1, 3, 32767, -32768, -32768 + 2, -1]) for _ in range(vocab)] for _ in range(S)]
    logits = torch.randn(len(slots), vocab) * 10
    logits[0, 0], logits[2, 1], logits[3, 2] = float("-inf"), float("inf"), float("nan")
    expected = logits.clone()
    for n, slot in enumerate(slots):
        if not (0 <= slot < S and on[slot]):
            continue
        for token, packed in enumerate(counts[slot]):
            x, times = float(logits[n, token]), packed & 32767
            if packed:
                x = x / r[slot] if x > 0 else x * r[slot]
            if times:
                x -= f[slot] * times + p[slot]
            expected[n, token] = x
    args = (logits, ints(slots), torch.tensor(counts, dtype=torch.int16), ints(on), floats(r), floats(f), floats(p))
    for after, _ in run_both(penalties, args):
        torch.testing.assert_close(after[0], expected, rtol=1e-5, atol=1e-4, equal_nan=True)
        untouched = [1, 4, 5, 6]  # padding, out of range, off, all neutral
        torch.testing.assert_close(after[0][untouched], logits[untouched], rtol=0, atol=0)
