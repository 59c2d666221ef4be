"""The run-ahead depth follows the device."""

from __future__ import annotations

from headway.engine.pacer import CALM_STEPS, MAX_ADAPTIVE_DEPTH, Pacer


def test_fixed_depth_never_moves() -> None:
    pacer = Pacer(2, asynchronous=True)
    pacer.observe(ran_dry=True, had_spare=False)
    assert pacer.depth == pacer.max_depth == 2 and not pacer.is_adaptive


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


def test_auto_is_plain_on_a_synchronous_device() -> None:
    assert Pacer("auto", asynchronous=False).depth == 0
