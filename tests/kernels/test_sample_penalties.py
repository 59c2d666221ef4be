"""The penalties of ``sample`` against a plain loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.kernels.sample import MIN_P, PENALTIES, RANDOM, TOP, sample
from headway.kernels.sample.reference import _penalised
from headway.kernels.testing import kernel_dtypes
from tests.kernels.guarded import floats, ints, run_both
from tests.kernels.penalty_tables import OFF, penalised, tables

EACH = [(1.3, 0.5, 0.0), (0.5, -2.0, 2.0), (1.5, 0.5, 0.5), (1.0, 0.25, -1.5), OFF, (1.0, 0.0, 0.0), (3.0, 0.0, 0.0)]


def greedy(logits: torch.Tensor, slots: list[int], penalties: tuple[torch.Tensor, ...], flags: int) -> tuple[Any, ...]:
    number = len(penalties[1])
    heat, whole = floats([0.0] * number), floats([1.0] * number)
    seeds = ints([[1, 2]] * number)
    tables = (heat, ints([0] * number), whole, heat.clone(), seeds, ints([5] * number))
    return (logits, ints(slots), *tables, *penalties, flags)


@pytest.mark.parametrize("vocab", [5, 97, 1031, 5000])
def test_the_reference_follows_the_formula(vocab: int) -> None:
    penalties = tables(EACH, vocab)
    slots = torch.arange(len(EACH))
    logits = torch.randn(len(EACH), vocab) * 10
    logits[0, 0], logits[2, 1], logits[3, 2] = float("-inf"), float("inf"), float("nan")
    found = _penalised(logits, slots, slots < 6, *penalties)
    for n, each in enumerate(EACH):
        on = n < 6 and penalties[1][n]  # the last is not in the table
        counts = penalties[0][n].tolist()
        expected = torch.tensor(penalised(logits[n].tolist(), counts, each)) if on else logits[n]
        torch.testing.assert_close(found[n], expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", kernel_dtypes())
@pytest.mark.parametrize("vocab", [5, 97, 4500])
def test_greedy_rows_take_the_largest_penalised_logit(vocab: int, dtype: torch.dtype) -> None:
    """Without RANDOM, and in the kernels that filter; pad rows and slots without penalties among them."""
    rng = random.Random(vocab)
    penalties = tables(EACH, vocab)
    slots = [*range(len(EACH)), -1, len(EACH), *(rng.randrange(len(EACH)) for _ in range(6))]
    logits = (torch.randn(len(slots), vocab, generator=torch.Generator().manual_seed(vocab)) * 4).to(dtype)
    logits[2, 1] = float("-inf")
    expected = []
    for n, slot in enumerate(slots):
        if not 0 <= slot < len(EACH):
            expected.append(0)
            continue
        values = penalised(logits[n].float().tolist(), penalties[0][slot].tolist(), EACH[slot])
        expected.append(values.index(max(values)))
    plain = [int(logits[n].float().argmax()) for n in range(len(slots))]
    assert any(mine != theirs for mine, theirs in zip(expected, plain, strict=True))
    for flags in (PENALTIES, PENALTIES | RANDOM | TOP | MIN_P):
        for _, drawn in run_both(sample, greedy(logits, slots, penalties, flags)):
            assert drawn.tolist() == expected


def test_a_row_of_which_all_is_forbidden_stays_so() -> None:
    """Masks come before penalties, and are not undone by them."""
    logits = torch.full((len(EACH), 97), float("-inf"))
    logits[:3, 40] = -5.0
    for _, drawn in run_both(sample, greedy(logits, list(range(len(EACH))), tables(EACH, 97), PENALTIES)):
        assert drawn.tolist() == [40] * 3 + [-1] * (len(EACH) - 3)
