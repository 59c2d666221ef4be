"""The penalties' tables that ``sample`` takes, and what they mean, as a plain loop."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from tests.kernels.guarded import floats, ints

OFF = (1.0, 0.0, 0.0)
"""(repetition, frequency, presence) of a slot without penalties."""
Tables = tuple[torch.Tensor, ...]


def tables(each: Sequence[tuple[float, float, float]], vocab: int) -> Tables:
    """(counts, count_on, repetition, frequency, presence) of slots; those that have none have counts of an earlier owner."""
    rng, choice = random.Random(vocab), [0, 0, 1, 3, 32767, -32768, -32768 + 2, -1]
    line = [[rng.choice(choice) for _ in range(vocab)] for _ in range(min(3, len(each)))]
    counts = torch.tensor(line, dtype=torch.int16)[torch.arange(len(each)) % 3]
    columns = [list(column) for column in zip(*each, strict=True)]
    return (counts, ints([int(one != OFF) for one in each]), *map(floats, columns))


def no_tables(slots: int, vocab: int) -> Tables:
    """Of slots without penalties."""
    return tables([OFF] * slots, vocab)


def penalised(values: Sequence[float], counts: Sequence[int], each: tuple[float, float, float]) -> list[float]:
    """Logits of a row, by the formula."""
    repetition, frequency, presence = each
    found = []
    for value, count in zip(values, counts, strict=True):
        x, times = value, count & 32767
        if count:
            x = x / repetition if x > 0 else x * repetition
        found.append(x - frequency * times - presence if times else x)
    return found
