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


def test_who_waits_for_others_sends_what_is_left_and_sleeps_at_its_box() -> None:
    accord: Any = object.__new__(Accord)
    done: list[Any] = []
    accord.box = SimpleNamespace(flush=lambda: done.append("flush"), wait=done.append)
    for awake in (False, True):
        accord._waited, accord._agreement = 0.0, SimpleNamespace(awake=awake)
        accord.wait()
        assert (accord._waited > 0.0) is awake
    assert done == ["flush", 0.05] * 2


class Post:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Letter] = []

    def send(self, letter: Letter) -> None:
        self.sent.append(letter)


def test_a_sleeper_is_woken_once_and_an_epoch_is_begun_once() -> None:
    post = Post()
    ours = Agreement(0, 3, post, depth=1, sizes=SIZES)
    assert not ours.must_wake() and not ours.awake
    ours.follow()
    assert (ours.awake, ours.epoch) == (False, 0), "nobody has begun one"
    ours.take(Letter(2, 1, 0, IDLE, wakes=True))
    ours.take(Letter(1, 1, 0, IDLE, wakes=True))
    assert ours.must_wake() and not post.sent
    ours.follow()
    assert (ours.awake, ours.epoch, ours.step) == (True, 1, 0) and not ours.must_wake() and not post.sent
    ours.wake()
    assert ours.epoch == 1 and not post.sent, "it is awake"
    with pytest.raises(RankError, match="rank 1 is in epoch 3, this one still in 1"):
        ours.take(Letter(1, 3, 0, IDLE, wakes=True))
    ours.take(Letter(1, 2, 0, IDLE, wakes=True))  # a rank that was faster than this one to end the epoch


def test_who_wakes_the_others_tells_them_so() -> None:
    post = Post()
    ours = Agreement(1, 2, post, depth=2, sizes=SIZES)
    ours.wake()
    assert post.sent == [Letter(1, 1, 0, IDLE, 0, True)]


def test_all_rest_in_front_of_a_step_that_nobody_wants() -> None:
    """What was said of it and of what follows is forgotten; what comes later is of the next epoch."""
    post = Post()
    ours = Agreement(0, 2, post, depth=1, sizes=SIZES)
    ours.wake()
    assert ours.begin(IDLE) and not ours.stops, "nobody was asked about the first step"
    ours.next()
    ours.take(Letter(1, 1, 1, Want(2, 2)))
    assert ours.begin(IDLE) and not ours.stops, "the other one wants it"
    ours.next()
    assert not ours.begin(IDLE) and not ours.stops, "the other one has not said yet"
    ours.take(Letter(1, 1, 2, IDLE))
    assert ours.begin(IDLE) and ours.stops
    ours.sleep()
    assert not ours.awake and ours._wants == {} and ours._checks == {}
    ours.take(Letter(1, 1, 3, IDLE))
    ours.wake()
    assert (ours.epoch, ours.step) == (2, 0) and ours.bucket == Bucket(SIZES[0], SIZES[0], 1, False, False)
    assert [(letter.epoch, letter.step, letter.wakes) for letter in post.sent] == [
        (1, 0, True), (1, 1, False), (1, 2, False), (1, 3, False), (2, 0, True),
    ]  # fmt: skip


def test_what_a_rank_is_about_to_run_is_told_where_it_is_known() -> None:
    post = Post()
    ours = Agreement(0, 2, post, depth=1, sizes=SIZES)
    ours.wake()
    assert ours.begin(Want(3, 3)) and post.sent[-1].ran_check == Bucket(SIZES[0], SIZES[0], 1, False, False).check
    ours.next()
    assert not ours.begin(Want(3, 3)) and post.sent[-1].ran_check == 0, "not yet"
    ours.take(Letter(1, 1, 1, Want(9, 2)))
    assert ours.begin(Want(3, 3)) and len(post.sent) == 3, "wishes are told once"
    assert ours.bucket == agreed([Want(3, 3), Want(9, 2)], SIZES)


@pytest.mark.parametrize("rank", [-1, 0, 2])
def test_letters_of_nobody(rank: int) -> None:
    ours = Agreement(0, 2, Post(), depth=1, sizes=SIZES)
    with pytest.raises(RankError, match=f"a letter of rank {rank}, which is none of 2"):
        ours.take(Letter(rank, 1, 0, IDLE, wakes=True))


def test_other_versions_are_no_letters() -> None:
    data = bytearray(Letter(1, 1, 1, IDLE).encode())
    data[-4] += 1
    with pytest.raises(RankError, match="rank 1 speaks version 2"):
        Letter.decode(bytes(data))


@pytest.mark.parametrize("bad", [2, 3])
def test_of_all_steps_within_reach_sizes_are_compared(bad: int) -> None:
    """A rank says what it runs of a step with its wish for a later one; whichever comes first, a difference is found."""
    ours = Agreement(0, 3, Post(), depth=1, sizes=SIZES)
    ours.wake()
    for step in range(1, 4):
        assert ours.begin(Want(1, 1))
        ours.next()
        right = agreed([Want(1, 1)] * 3, SIZES).check
        before = right if step > 1 else Bucket(SIZES[0], SIZES[0], 1, False, False).check
        for rank in (1, 2):
            said = before + 1 if (step, rank) == (bad, 2) else before
            letter = Letter(rank, 1, step, Want(1, 1), said)
            if said == before:
                ours.take(letter)
                continue
            with pytest.raises(RankError, match=f"rank 2 runs step {step - 1} of epoch 1 in another size"):
                ours.take(letter)
            return
    raise AssertionError("nothing was found")
