"""What the engine says of its steps: counts that add up, device times read on time and never early, waits by reason."""

from __future__ import annotations

from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.histogram import Histogram
from headway.core.messages import EngineStats
from headway.core.plan import StepPlan
from headway.device.waits import WaitCounter
from headway.engine import channel
from headway.engine.core import EngineCore
from headway.runner.executor import BACK_PRESSURE
from tests.engine.harness import MakeEngine, drain, request, run
from tests.sim.harness import simulated


def test_a_histogram_counts_inclusive_upper_bounds() -> None:
    histogram = Histogram.over((1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 5):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1] and histogram.total == 12 and histogram.count == 5
    kept = histogram.copy()
    histogram.observe(1)
    assert kept.counts == [2, 1, 1, 1]


def check_sums(stats: EngineStats) -> None:
    """What must hold of any engine that has applied all its steps."""
    assert stats.num_steps == stats.rows_per_step.count == stats.tokens_per_step.count == stats.host_step_seconds.count
    assert stats.num_in_flight == 0 and stats.num_graph_steps <= stats.num_steps
    host = stats.schedule_seconds + stats.launch_seconds + stats.apply_seconds
    assert host == pytest.approx(stats.host_step_seconds.total) and host > 0
    assert stats.num_timed_steps == stats.headway_seconds.count
    assert stats.num_timed_steps <= stats.device_step_seconds.count <= stats.num_steps
    assert stats.device_busy_seconds == pytest.approx(stats.device_step_seconds.total)
    assert stats.waits["back_pressure"] == stats.back_pressure_waits
    assert [b.step - a.step for a, b in pairwise(stats.recent_steps)] == [1] * (len(stats.recent_steps) - 1)


def test_a_cpu_engine_counts_steps_rows_and_tokens(make_engine: MakeEngine) -> None:
    core = make_engine()
    run(core, [request(f"r{i}", [5, 6, 7], max_tokens=4, ignore_eos=True) for i in range(3)])
    stats = core.stats()
    check_sums(stats)
    assert stats.tokens_per_step.total == 3 * 3 + 3 * 3 and stats.rows_per_step.total == 12
    assert not stats.has_device_clock and stats.num_timed_steps == 0 == stats.num_graph_steps
    assert {step.busy_us for step in stats.recent_steps} == {None}
    assert channel.decode_stats(channel.encode(stats)) == stats, "they cross the socket whole"


def test_the_queue_time_comes_once_and_nothing_is_kept_of_ended_requests(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every look at this clock is a second: how busy the machine is says nothing.
    monkeypatch.setattr("headway.engine.metrics.perf_counter", count(1000.0).__next__)
    core = make_engine(max_num_seqs=1)
    for name in ("first", "second", "aborted"):
        core.add(request(name, [5, 6], max_tokens=3, ignore_eos=True))
    core.abort("aborted")
    core.add(request("wrong", [5] * 60, max_tokens=900))
    queued: dict[str, list[float]] = {}
    while core.has_work():
        for update in core.step():
            if update.queue_seconds is not None:
                queued.setdefault(update.request_id, []).append(update.queue_seconds)
    assert {name: len(times) for name, times in queued.items()} == {"first": 1, "second": 1}
    assert 0 <= queued["first"][0] < queued["second"][0] < 1000, "from its arrival on"
    assert not core._meter._arrivals and not core._meter._queued


@pytest.mark.parametrize("depth", [0, 2])
def test_a_simulated_device_is_timed_without_a_wait(depth: int) -> None:
    """Virtual time: an operation is a microsecond. It refuses to tell a time early (tests/sim/test_step_clock.py)."""
    with simulated(3, run_ahead=depth) as (core, device, _):
        run(core, [request(f"r{i}", [5, 6, 7], max_tokens=12, ignore_eos=True) for i in range(4)])
        stats = core.stats()
        check_sums(stats)
        assert stats.has_device_clock and stats.num_graph_steps > 0
        # Every seventh tick of this clock is heard too late to be used; one step, the first, follows a rest.
        assert 0 < stats.num_timed_steps < stats.num_steps
        assert 0 <= stats.num_dry_steps <= stats.num_timed_steps
        assert 0 < stats.device_busy_seconds < device.timeline.num_executed * 1e-6
        if depth == 0:
            assert stats.num_dry_steps == stats.num_timed_steps and stats.headway_seconds.total == 0


def test_a_slow_device_leaves_a_lead_and_a_fast_one_runs_dry() -> None:
    leads = {}
    for name, speed in (("slow", 0.0), ("fast", 1.0)):
        with simulated(0, run_ahead=2) as (core, device, _):
            device.timeline.main.speed = device.timeline.copies.speed = speed
            run(core, [request("r", [5, 6, 7], max_tokens=20, ignore_eos=True)])
            leads[name] = core.stats()
    assert leads["slow"].num_dry_steps == 0 < leads["slow"].headway_seconds.total
    assert leads["fast"].num_dry_steps == leads["fast"].num_timed_steps > 0


def test_a_pause_of_an_idle_engine_is_not_the_devices_idleness() -> None:
    with simulated(0, run_ahead=0) as (core, device, _):
        device.timeline.main.speed = device.timeline.copies.speed = 1.0
        run(core, [request("a", [5], max_tokens=3, ignore_eos=True)])
        before = core.stats()
        device.timeline.num_executed += 10**9
        run(core, [request("b", [5], max_tokens=3, ignore_eos=True)])
        after = core.stats()
    assert after.num_timed_steps > before.num_timed_steps
    assert after.device_idle_seconds - before.device_idle_seconds < 1.0
    assert after.device_busy_seconds < 1.0


def test_copies_of_unpinned_memory_are_waits_with_a_reason() -> None:
    with simulated(1, run_ahead=1) as (core, device, _):
        device.pins_memory = False
        run(core, [request("r", [5, 6], max_tokens=4, ignore_eos=True)])
        stats = core.stats()
    assert stats.waits["unpinned_copy"] == 2 * stats.num_steps
    with simulated(1, run_ahead=1) as (core, _, _):
        run(core, [request("r", [5, 6], max_tokens=4, ignore_eos=True)])
        assert core.stats().waits["unpinned_copy"] == 0


def test_a_failed_launch_leaves_the_figures_in_step(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_engine()
    launch = core._runner.launch

    def broken(plan: StepPlan, *others: object) -> object:
        monkeypatch.setattr(core._runner, "launch", launch)
        raise RuntimeError("no")

    monkeypatch.setattr(core._runner, "launch", broken)
    answers = run(core, [request("a", [5, 6], max_tokens=3)])
    assert answers["a"].finish_reason == "error"
    core.add(request("b", [5, 6], max_tokens=3, ignore_eos=True))
    assert drain(core)["b"].finish_reason == "length"
    assert core.stats().rows_per_step.count == core.stats().num_steps == 3


def test_times_are_told_in_seconds() -> None:
    """What is measured in microseconds is a million times as large; a number each, so that none stands in for another."""
    pacer: Any = SimpleNamespace(saved_us=7e6)
    waits = {BACK_PRESSURE: WaitCounter(2, 3.0), "other": WaitCounter(4, 5.0)}
    runner: Any = SimpleNamespace(num_replays=6, waits=lambda: waits, device=SimpleNamespace(clock=None))
    core: Any = SimpleNamespace(
        _scheduler=SimpleNamespace(stats=EngineStats), _runner=runner, _num_steps=8, _accord=None, _waits=None,
        _pacer=SimpleNamespace(depth=9), _in_flight=[None] * 10, _draft_pacer=pacer,
        _meter=SimpleNamespace(fill=lambda _: None),
    )  # fmt: skip
    stats = EngineCore.stats(core)
    assert (stats.num_steps, stats.num_graph_steps, stats.run_ahead, stats.num_in_flight) == (8, 6, 9, 10)
    assert (stats.waits, stats.wait_seconds) == ({BACK_PRESSURE: 2, "other": 4}, {BACK_PRESSURE: 3.0, "other": 5.0})
    assert (stats.back_pressure_waits, stats.back_pressure_seconds) == (2, 3.0)
    assert stats.draft_saved_seconds == 7.0 and not stats.has_device_clock and stats.host_waits is None
