"""As many drafts as pay, tried again where they do not; by numbers, not by clocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from headway.core.speculative import draft_widths
from headway.engine.draft_pacer import LONGEST_PAUSE, PROBE_STEPS, TRUSTED_STEPS, DraftPacer
from headway.runner.graphs import decode_shapes, row_buckets

K = 4
WIDTHS = draft_widths(K, adaptive=True)
Cost = Callable[[int, int], float]
"""(width, rows) -> microseconds of a step."""


def bound_by_memory(width: int, rows: int) -> float:
    return 1000.0 + 2.0 * width * rows


def bound_by_products(width: int, rows: int) -> float:
    return 100.0 + 50.0 * width * rows


def between(width: int, rows: int) -> float:
    return 1000.0 + 10.0 * width * rows


def with_a_step(width: int, rows: int) -> float:
    """Rows of three tokens and more take another kernel: no line leads there."""
    return 1000.0 + (600.0 if width > 2 else 0.0) + 2.0 * width * rows


def drive(
    pacer: DraftPacer, steps: int, rows: int, chance: float, cost: Cost, depth: int = 0, seed: int = 0
) -> list[int]:
    """Widths of so many steps in which each draft is right by ``chance``, results coming ``depth`` steps late."""
    rng, widths = random.Random(seed), [pacer.width] * (depth + 1)
    for _ in range(steps):
        width = widths[-1 - depth]
        reached = [rows]
        for _ in range(1, width):
            reached.append(sum(rng.random() < chance for _ in range(reached[-1])))
        widths.append(pacer.observe(width, reached, cost(width, rows) * rng.uniform(0.97, 1.03)))
    return widths[depth + 1 :]


def best(rows: int, chance: float, cost: Cost) -> int:
    return max(WIDTHS, key=lambda width: sum(chance**place for place in range(width)) / cost(width, rows))


def drafting(widths: list[int]) -> float:
    return sum(width > 1 for width in widths) / len(widths)


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize(
    ("rows", "chance", "cost", "wanted"),
    [
        (4, 0.5, bound_by_memory, 5),
        (4, 0.0, bound_by_memory, 1),
        (64, 0.5, bound_by_products, 1),
        (64, 0.8, bound_by_products, 1),
        (256, 0.9, bound_by_memory, 5),
        (64, 0.6, between, 2),
        (64, 0.75, between, 3),
        (64, 0.7, with_a_step, 2),
    ],
)
def test_as_many_drafts_as_pay(rows: int, chance: float, cost: Cost, wanted: int, depth: int) -> None:
    """All, none or some. Nothing is known to begin with but that there are these widths."""
    assert best(rows, chance, cost) == wanted
    widths = drive(DraftPacer(WIDTHS), 4000, rows, chance, cost, depth)[400:]
    assert set(widths) <= set(WIDTHS)
    assert sum(width == wanted for width in widths) > 0.9 * len(widths), {w: widths.count(w) for w in WIDTHS}


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_it_costs_little_where_nothing_is_right(rows: int) -> None:
    widths = drive(DraftPacer(WIDTHS), 3000, rows, 0.0, bound_by_memory)
    took = sum(bound_by_memory(width, rows) for width in widths)
    assert took < 1.05 * 3000 * bound_by_memory(1, rows)


def test_texts_and_loads_change() -> None:
    pacer = DraftPacer(WIDTHS)
    assert drafting(drive(pacer, 600, 4, 0.0, bound_by_memory)) < 0.2
    widths = drive(pacer, 2 * LONGEST_PAUSE, 4, 0.8, bound_by_memory)  # now the text repeats itself
    assert drafting(widths[LONGEST_PAUSE:]) > 0.9
    assert drafting(drive(pacer, 1000, 256, 0.3, bound_by_products)) < 0.1
    widths = drive(pacer, 60, 4, 0.8, bound_by_memory)  # a lighter load is reason to try at once
    assert drafting(widths[20:]) > 0.8


def test_all_are_tried_again_within_a_bounded_time() -> None:
    """However often they have not paid."""
    widths = drive(DraftPacer(WIDTHS), 20 * LONGEST_PAUSE, 4, 0.0, bound_by_memory)
    tries = [step for step, width in enumerate(widths) if width == WIDTHS[-1]]
    apart = [later - step for step, later in itertools.pairwise([*tries, len(widths)])]
    assert max(apart) <= LONGEST_PAUSE + 2 * PROBE_STEPS


@pytest.mark.parametrize("seed", range(4))
def test_it_follows_whatever_changes(seed: int) -> None:
    """Texts, load and what steps cost, any of these after long sameness: by then what was measured before has aged."""
    rng, pacer = random.Random(seed), DraftPacer(WIDTHS)
    for phase in range(4):
        rows, chance, plain, more = (
            rng.choice((4, 60)),
            rng.choice((0.1, 0.5, 0.9)),
            rng.choice((90, 900)),
            rng.choice((2, 90, 600)),
        )

        def cost(width: int, _rows: int, plain: int = plain, more: int = more) -> float:
            return plain + more * (width - 1.0)

        def worth(width: int, chance: float = chance, cost: Cost = cost, rows: int = rows) -> float:
            return sum(chance**place for place in range(width)) / cost(width, rows)

        last = drive(pacer, TRUSTED_STEPS + 2 * LONGEST_PAUSE, rows, chance, cost, seed=phase)[-LONGEST_PAUSE:]
        found = sum(map(worth, last)) / len(last)
        assert found > 0.9 * worth(best(rows, chance, cost)), (phase, rows, chance, plain, more)


def test_steps_beside_prompts_say_nothing_of_time() -> None:
    pacer = DraftPacer(WIDTHS)
    for _ in range(500):
        assert pacer.observe(pacer.width, [4, 0, 0, 0, 0], None) == 5, "there is nothing to compare yet"
    assert pacer.observe(5, [0] * 5, 5.0) == 5


def test_widths_are_few_and_their_graphs_fewer() -> None:
    assert [draft_widths(number, adaptive=True) for number in (1, 2, 3, 4, 8)] == [
        (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 3, 5), (1, 3, 5, 9)
    ]  # fmt: skip
    assert draft_widths(8, adaptive=False) == (1, 9)
    for rows in (1, 5, 64, 256):
        whole, some = decode_shapes(rows, (1, 5)), decode_shapes(rows, WIDTHS)
        assert len(whole) == 2 * len(row_buckets(rows)) and len(some) <= 2 * len(whole)
        assert {shape.rows for shape in some if shape.width == 3} >= {1, rows}
    assert len(decode_shapes(256, WIDTHS)) < 1.4 * len(decode_shapes(256, (1, 5)))


def test_what_drafts_save_is_told_by_the_times_of_steps_without() -> None:
    pacer = DraftPacer((1, 4))
    pacer.observe(4, [2, 2, 2, 2], 1500.0)
    assert pacer.saved_us == 0.0, "no step without drafts has been timed"
    while pacer.width == 4:
        pacer.observe(4, [2, 2, 2, 2], 1500.0)
    pacer.observe(1, [2], 1000.0)
    pacer.observe(1, [4], 700.0)
    assert pacer.saved_us == 0.0
    pacer.observe(4, [2, 2, 1, 1], 1500.0)
    assert pacer.saved_us == pytest.approx(1000.0 * 3 - 1500.0), "three tokens a row: three steps without drafts"
    pacer.observe(4, [3, 0, 0, 0], 1500.0)
    assert pacer.saved_us == pytest.approx(1500.0 - 500.0), "nothing accepted: the step cost half a step more"
    pacer.observe(4, [2, 1, 1, 1], None)
    pacer.observe(4, [64, 1, 1, 1], 1500.0)
    assert pacer.saved_us == pytest.approx(1000.0), "prompts beside them, or rows of which no plain step is known"


def test_times_and_acceptance_of_long_ago_count_no_more() -> None:
    """Plain steps were timed once, when they were dear: where that is trusted drafts go on, else they are asked again."""
    found = {}
    for trusted in (10_000, 60):
        pacer = DraftPacer((1, 4), trusted_steps=trusted)
        drive(pacer, 40, 4, 0.5, bound_by_memory)
        while pacer.width == 1:
            pacer.observe(1, [4], 1000.0)
        widths = [pacer.observe(pacer.width, [4, 2, 1, 0][: pacer.width], 900.0) for _ in range(200)]
        found[trusted] = 1 in widths
    assert found == {10_000: False, 60: True}
    shares = []
    for remembered in (16, 4096):
        pacer = DraftPacer((1, 4), remembered_rows=remembered)
        for right in (2, 0):
            for _ in range(200):
                pacer.observe(4, [2, right, right, right], None)
        shares.append(pacer._tokens(4))
    assert shares[0] == pytest.approx(1.0, abs=0.01) and shares[1] > 1.5, (
        "what was accepted long ago counts or does not"
    )
