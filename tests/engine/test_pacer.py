"""The run-ahead depth follows the device."""

from __future__ import annotations

from collections import deque

import pytest

from headway.engine.pacer import CALM_STEPS, MAX_ADAPTIVE_DEPTH, Pacer
from tests.engine.harness import MakeEngine


def test_fixed_depth_never_moves() -> None:
    pacer = Pacer(2, asynchronous=True)
    pacer.observe(ran_dry=True, had_spare=False)
    assert pacer.depth == 2 and not pacer.is_adaptive


def test_auto_rises_when_the_device_runs_dry_and_falls_when_calm() -> None:
    pacer = Pacer("auto", asynchronous=True)
    assert pacer.depth == 1
    for _ in range(10):
        pacer.observe(ran_dry=True, had_spare=False)
    assert pacer.depth == MAX_ADAPTIVE_DEPTH
    for _ in range(CALM_STEPS - 1):
        pacer.observe(ran_dry=False, had_spare=True)
    assert pacer.depth == MAX_ADAPTIVE_DEPTH
    pacer.observe(ran_dry=False, had_spare=True)
    assert pacer.depth == MAX_ADAPTIVE_DEPTH - 1
    for _ in range(20 * CALM_STEPS):
        pacer.observe(ran_dry=False, had_spare=True)
    assert pacer.depth == 1


def test_calm_is_counted_in_a_row() -> None:
    pacer = Pacer("auto", asynchronous=True)
    pacer.observe(ran_dry=True, had_spare=False)
    for _ in range(3):
        for _ in range(CALM_STEPS - 1):
            pacer.observe(ran_dry=False, had_spare=True)
        pacer.observe(ran_dry=False, had_spare=False)
    assert pacer.depth == 2


class Step:
    """A launched step: done or not."""

    def __init__(self, done: bool) -> None:
        self.ticket = self
        self.ready = lambda: done


@pytest.mark.parametrize(
    ("done", "seen"),
    [
        ([True, False, False], (False, True)),
        ([True, True, False], (False, False)),
        ([True, True, True], (True, False)),
        ([False], (False, False)),
        ([True], (True, False)),
    ],
)
def test_dry_is_when_the_newest_step_is_done_and_spare_when_the_one_before_it_is_not(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, done: list[bool], seen: tuple[bool, bool]
) -> None:
    core, told = make_engine(), []
    monkeypatch.setattr(core, "_pacer", Pacer("auto", asynchronous=True))
    monkeypatch.setattr(Pacer, "observe", lambda self, ran_dry, had_spare: told.append((ran_dry, had_spare)))
    monkeypatch.setattr(core, "_in_flight", deque(Step(each) for each in done))
    core._observe_headway()
    assert told == [seen]
    monkeypatch.undo()


def test_auto_is_plain_on_a_synchronous_device() -> None:
    assert Pacer("auto", asynchronous=False).depth == 0
