"""Drafts are left out where they do not pay, and tried again; by numbers, not by clocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headway.engine.draft_pacer import LONGEST_PAUSE, DraftPacer

W = 5
Cost = Callable[[int, int], float]
"""(width, rows) -> microseconds of a step."""


def bound_by_memory(width: int, rows: int) -> float:
    return 1000.0 + 2.0 * width * rows


def bound_by_products(width: int, rows: int) -> float:
    return 100.0 + 50.0 * width * rows


def drive(
    pacer: DraftPacer, steps: int, rows: int, length: float, cost: Cost, depth: int = 0, seed: int = 0
) -> list[int]:
    """Widths of so many steps whose rows bring ``length`` tokens with drafts, results coming ``depth`` steps late."""
    rng, widths, spread = random.Random(seed), [pacer.width] * (depth + 1), min(length - 1, W - length)
    for _ in range(steps):
        width = widths[-1 - depth]
        tokens = rows if width == 1 else round(rows * (length + spread * rng.uniform(-1.0, 1.0)))
        widths.append(pacer.observe(width, rows, tokens, cost(width, rows) * rng.uniform(0.95, 1.05)))
    return widths[depth + 1 :]


def drafting(widths: list[int]) -> float:
    return sum(width > 1 for width in widths) / len(widths)


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize(
    ("rows", "length", "cost", "pays"),
    [
        (4, 1.6, bound_by_memory, True),
        (4, 1.0, bound_by_memory, False),
        (64, 2.0, bound_by_products, False),
        (64, 4.5, bound_by_products, False),
        (256, 1.8, bound_by_memory, False),
        (256, 3.5, bound_by_memory, True),
    ],
)
def test_drafts_where_they_pay(rows: int, length: float, cost: Cost, pays: bool, depth: int) -> None:
    widths = drive(DraftPacer(W), 4000, rows, length, cost, depth)
    assert drafting(widths[200:]) > 0.98 if pays else drafting(widths[200:]) < 0.06
    assert set(widths) <= {1, W}


def test_it_costs_little_where_nothing_is_right() -> None:
    widths = drive(DraftPacer(W), 3000, 64, 1.0, bound_by_memory)
    took = sum(bound_by_memory(width, 64) for width in widths)
    assert took < 1.05 * 3000 * bound_by_memory(1, 64)


def test_texts_and_loads_change() -> None:
    pacer = DraftPacer(W)
    assert drafting(drive(pacer, 600, 4, 1.0, bound_by_memory)) < 0.2
    widths = drive(pacer, 2 * LONGEST_PAUSE, 4, 3.0, bound_by_memory)  # now the text repeats itself
    assert drafting(widths[LONGEST_PAUSE:]) > 0.9
    assert drafting(drive(pacer, 1000, 256, 1.5, bound_by_products)) < 0.1
    widths = drive(pacer, 60, 4, 3.0, bound_by_memory)  # a lighter load is reason to try at once
    assert drafting(widths[20:]) > 0.8


def test_steps_beside_prompts_say_nothing_of_time() -> None:
    pacer = DraftPacer(W)
    for _ in range(500):
        assert pacer.observe(pacer.width, 4, 4, None) == W, "there is nothing to compare yet"
    assert pacer.observe(W, 0, 0, 5.0) == W
