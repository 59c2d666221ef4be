"""Ranks agree on the size of each step ahead of time: over a disorderly network, with slow and dead ranks."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from headway.engine.accord import Accord
from headway.parallel.dp import IDLE, LAGS, STARTS, Agreement, Bucket, Letter, Want, agreed
from headway.parallel.group import RankError
from tests.parallel.network import SIZES, Network, Scenario


def run(scenario: Scenario, **options: Any) -> Network:
    """A scenario whose end is as it should be."""
    network = Network(scenario, **options)
    network.run()
    assert not network.deadlocked
    steps = [[(epoch, step, bucket) for epoch, step, bucket in rank.ran] for rank in network.ranks]
    assert all(each == steps[0] for each in steps), "all ranks run the same steps in the same sizes"
    assert sum(rank.finished for rank in network.ranks) > 0
    return network


@pytest.mark.parametrize("seed", range(60))
def test_no_deadlock(seed: int) -> None:
    run(Scenario(seed))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_no_deadlock_in_a_thousand(block: int) -> None:
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        run(Scenario(seed))


def test_a_fast_network_costs_no_wait_but_at_the_start() -> None:
    """Letters that arrive within a step are there when they are needed."""
    network = Network(Scenario(5, size=4, depth=2, delay=1e-6, arrivals=8))
    network.slow = [1.0] * 4
    network.run()
    lags = sum(rank.agreement.waits.by_reason["peer_lags"] for rank in network.ranks)
    steps = sum(len(rank.ran) for rank in network.ranks)
    assert lags <= steps // 20, (lags, steps)


def test_a_slow_rank_is_waited_for_and_counted() -> None:
    network = Network(Scenario(9, size=3, depth=1, delay=0.01, arrivals=6))
    network.slow = [1.0, 1.0, 200.0]
    network.run()
    assert not network.deadlocked
    waits = [rank.agreement.waits.by_reason.total() for rank in network.ranks]
    assert waits[0] and waits[1] and waits[2] <= min(waits[:2])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_waits_have_the_reason_that_they_have(depth: int) -> None:
    """What another rank wants of a step it says ``depth`` steps before: of the first ones that nobody agreed on when it begins
    them itself, and of the others when it has caught up."""

    class Nowhere:
        def send(self, letter: Letter) -> None:
            """No letter needs to arrive: the other rank's are written here."""

    one = Agreement(0, 2, Nowhere(), depth=depth, sizes=(8,))
    one.wake()
    expected: Counter[str] = Counter()
    for step in range(4 * depth):
        if step >= depth:
            for _ in range(2):
                assert not one.begin(Want(1, 1)), "the other one has not said yet what it wants"
            expected[STARTS if step < 2 * depth else LAGS] += 1
            assert one.missing == [1]
            one.take(Letter(1, 1, step, Want(1, 1)))
        assert one.begin(Want(1, 1)) and one.missing == []
        one.next()
        assert one.waits.by_reason == expected


@pytest.mark.parametrize("seed", range(8))
def test_the_watchdog_names_a_dead_rank(seed: int) -> None:
    scenario = Scenario(seed, size=3, arrivals=10, killed=1)
    network = Network(scenario)
    told = ""
    try:
        network.run()
    except RankError as error:
        told = str(error)
    waiting = [rank for n, rank in enumerate(network.ranks) if n != 1 and rank.agreement.awake]
    if told or not all(
        rank.in_flight for rank in waiting
    ):  # else it died while all slept, or in a step that all had begun
        assert re.match(r"rank 1 said nothing of step \d+", told)


def test_nobody_is_ahead_by_more_than_the_depth() -> None:
    sent: list[Letter] = []

    class Post:
        def send(self, letter: Letter) -> None:
            sent.append(letter)

    ours = Agreement(0, 2, Post(), depth=3, sizes=SIZES)
    ours.wake()
    for _ in range(3):
        assert ours.begin(Want(1, 1))
        ours.next()
    assert not ours.begin(Want(1, 1))
    assert ours.missing == [1]
    ours.take(Letter(1, 1, 3, IDLE))
    assert ours.begin(Want(1, 1))
    assert [letter.step for letter in sent if not letter.wakes] == [3, 4, 5, 6]


def test_an_idle_rank_runs_what_the_others_want() -> None:
    assert agreed([IDLE, Want(5, 5)], SIZES) == Bucket(8, 8, 1, True, False)
    assert agreed([Want(100, 2, only_decode=False, halves=True), IDLE], SIZES) == Bucket(32, 4, 1, False, True)
    assert agreed([Want(3, 3, width=4), Want(1, 1)], SIZES).width == 4


def test_a_late_letter_is_not_taken_for_a_new_one() -> None:
    class Post:
        def send(self, letter: Letter) -> None: ...

    ours = Agreement(0, 2, Post(), depth=1, sizes=SIZES)
    ours.wake()
    ours.begin(Want(1, 1))
    ours.next()
    ours.take(Letter(1, 1, 1, Want(7, 7)))
    assert ours.begin(Want(1, 1))
    ours.next()
    ours.take(Letter(1, 1, 1, Want(30, 30)))  # of the step before
    assert ours.late == 1
    assert ours.bucket is None


def test_contradictions_are_found() -> None:
    class Post:
        def send(self, letter: Letter) -> None: ...

    ours = Agreement(0, 2, Post(), depth=1, sizes=SIZES)
    ours.wake()
    ours.begin(Want(1, 1))
    ours.take(Letter(1, 1, 1, Want(7, 7)))
    with pytest.raises(RankError, match="rank 1 wants two things of step 1"):
        ours.take(Letter(1, 1, 1, Want(8, 8)))
    ours.next()
    assert ours.begin(Want(1, 1))
    with pytest.raises(RankError, match="rank 1 runs step 1 of epoch 1 in another size than rank 0"):
        ours.take(Letter(1, 1, 2, IDLE, ran_check=12345))
    with pytest.raises(RankError, match="none of 2"):
        ours.take(Letter(5, 1, 2, IDLE))


def test_letters_travel_as_bytes() -> None:
    letter = Letter(3, 7, 900_000, Want(8192, 256, 4, False, True), 0x7FFFFFFF, True)
    assert Letter.decode(letter.encode()) == letter
    with pytest.raises(RankError):
        Letter.decode(b"x" * 31)


def test_seconds_of_all_reasons_are_told_once() -> None:
    """Sums over reasons are what an engine shows of itself."""
    accord: Any = object.__new__(Accord)
    for waited, counts in ((0.0, {}), (3.0, {"peer_lags": 4}), (3.0, {"peer_lags": 4, "starts": 1, "idle": 7})):
        accord._waited, accord._agreement = waited, SimpleNamespace(waits=SimpleNamespace(by_reason=Counter(counts)))
        found = accord.waits()
        assert {reason: each.waits for reason, each in found.items()} == counts
        assert sum(each.seconds for each in found.values()) == pytest.approx(waited)
