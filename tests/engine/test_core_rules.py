"""The host loop's small rules, over a scheduler and a runner that do as they are told: whose fault a failure is, what the
counters are, when there is work, in which order it lets go."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import ConfigError, HeadwayError, InvalidRequestError
from headway.core.messages import EngineStats, RequestUpdate
from headway.core.task import Task
from headway.device.base import DeviceError
from headway.device.waits import WaitCounter
from headway.engine import core
from headway.engine.core import EngineCore
from headway.runner.executor import BACK_PRESSURE
from headway.syncs import SyncError
from tests.engine.harness import request

no_wait: Any = None


class AcceleratorError(RuntimeError):
    """Named as torch's."""


class Parts:
    """A scheduler, a runner, a pacer and a clock, and what they were asked, in order."""

    def __init__(self, **core_arguments: Any) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.unfinished = self.is_lost = False
        self.kept = 0
        forget = SimpleNamespace(forget=lambda name: self.asked.append(("forget", name)), num_prepared=2)
        self.scheduler: Any = SimpleNamespace(
            add=self.add,
            abort=lambda name: self.asked.append(("abort", name)),
            has_unfinished=lambda: self.unfinished,
            stats=lambda: EngineStats(num_running=1, num_steps=99),
            check_integrity=lambda: self.asked.append("checked"),
            discard=lambda plan, message: [RequestUpdate(request_id="r", new_token_ids=[], error=message)],
        )
        self.runner: Any = SimpleNamespace(
            admissions=forget,
            clock=SimpleNamespace(),
            followers=None,
            is_lost=False,
            num_replays=7,
            waits=lambda: {BACK_PRESSURE: WaitCounter(3, 0.5), "pageable": WaitCounter(4, 0.25)},
            device=SimpleNamespace(clock=None),
            collect=lambda step: self.asked.append(("collect", step)),
            release=lambda: self.asked.append("released"),
        )
        info: Any = SimpleNamespace(vocab_size=9, tasks=(Task.GENERATE,))
        pacer: Any = SimpleNamespace(depth=2)
        made: Any = EngineCore
        self.core: Any = made(self.scheduler, self.runner, pacer, info, **core_arguments)

    def add(self, message: Any) -> None:
        self.asked.append(("add", message.request_id))
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "parameter", "text"),
    [
        (InvalidRequestError("too long", "prompt"), "prompt", "too long"),
        (InvalidRequestError("odd"), "request", "odd"),
        (ConfigError("x"), None, "x"),
        (KeyError("k"), None, "KeyError: 'k'"),
        (RuntimeError("CUDA out of memory"), None, "RuntimeError: CUDA out of memory"),
    ],
)
def test_a_request_fails_alone(error: Exception, parameter: str | None, text: str) -> None:
    """With the field at fault where it is the request's; its slot's preparation is forgotten."""
    parts = Parts()
    parts.error = error
    parts.core.add(request("r", [1], 1))
    [failed] = parts.core._failures
    assert (failed.request_id, failed.finish_reason, failed.new_token_ids) == ("r", "error", [])
    assert (failed.error, failed.error_parameter) == (text, parameter)
    assert parts.asked == [("add", "r"), ("forget", "r")] and parts.core.has_work()


@pytest.mark.parametrize(
    "error",
    [
        DeviceError("x"),
        SyncError("x", no_wait),
        AcceleratorError("x"),
        RuntimeError("CUDA error: an illegal memory access"),
    ],
)
def test_a_lost_device_is_the_engines(error: Exception) -> None:
    """Where a request is added, and where a step is launched."""
    parts = Parts()
    parts.error = error
    with pytest.raises(type(error)):
        parts.core.add(request("r", [1], 1))
    with pytest.raises(type(error)):
        parts.core._fail_plan(SimpleNamespace(step=3), error)
    assert not parts.core._failures


def test_a_step_that_could_not_be_launched() -> None:
    parts = Parts()
    parts.core._fail_plan(SimpleNamespace(step=3), ValueError("x"))
    assert [each.error for each in parts.core._failures] == ["ValueError: x"]
    assert core._is_fatal(ValueError("CUDA error")) is False, "torch raises RuntimeErrors"


def test_another_task_is_refused() -> None:
    parts, asked = Parts(), request("r", [1], 1)
    asked.task = Task.EMBED
    parts.core.add(asked)
    [failed] = parts.core._failures
    assert (failed.error, failed.error_parameter) == ("this model serves generate, not the task 'embed'", "task")


def test_counters() -> None:
    waits = SimpleNamespace(counts=lambda: {"item": 5})
    accord = SimpleNamespace(
        waits=lambda: {"letter": WaitCounter(6, 0.125)}, is_needed=lambda: False, box=SimpleNamespace(fileno=lambda: 11)
    )
    parts = Parts(waits=waits, accord=accord, draft_pacer=SimpleNamespace(saved_us=2.5e6))
    parts.core._num_steps = 8
    parts.core._in_flight += ["one", "two"]
    stats = parts.core.stats()
    assert (stats.num_running, stats.num_steps, stats.num_graph_steps) == (1, 8, 7), "steps are the loop's own count"
    assert stats.waits == {BACK_PRESSURE: 3, "pageable": 4, "letter": 6}
    assert stats.wait_seconds == {BACK_PRESSURE: 0.5, "pageable": 0.25, "letter": 0.125}
    assert (stats.back_pressure_waits, stats.back_pressure_seconds) == (3, 0.5)
    assert (stats.run_ahead, stats.num_in_flight, stats.draft_saved_seconds) == (2, 2, 2.5)
    assert stats.host_waits == {"item": 5} and stats.has_device_clock is False
    assert parts.core.watches and parts.core.wakes == 11
    parts.runner.device.clock = object()
    assert parts.core.stats().has_device_clock is True
    alone = Parts()
    assert alone.core.stats().draft_saved_seconds == 0.0 and alone.core.stats().host_waits is None
    assert not alone.core.watches and alone.core.wakes is None
    alone.runner.followers = object()
    assert alone.core.watches


def test_a_replica_sleeps_where_others_hold_its_next_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a step of its own is under way, nor where nobody is to come."""
    monkeypatch.setattr(core, "Scheduler", SimpleNamespace)
    needed, slept = [True], list[str]()
    accord = SimpleNamespace(
        begin=lambda want: None, is_needed=lambda: needed[0], wait=lambda: slept.append("slept"), launched=no_wait
    )
    parts = Parts(accord=accord)
    parts.scheduler.outlook = lambda: (3, 2, True)
    assert not parts.core._next_step() and slept == ["slept"]
    parts.core._in_flight.append("one")
    assert not parts.core._next_step() and slept == ["slept"]
    parts.core._in_flight.clear()
    needed[0] = False
    assert not parts.core._next_step() and slept == ["slept"]


def test_when_there_is_work() -> None:
    needed: list[str] = []
    parts = Parts(accord=SimpleNamespace(is_needed=lambda: bool(needed)))
    assert not parts.core.has_work()
    parts.unfinished = True
    assert parts.core.has_work()
    parts.unfinished, parts.runner.is_lost = False, True
    assert parts.core.has_work()
    parts.runner.is_lost = False
    for kept in (needed, parts.core._in_flight, parts.core._failures):
        assert not parts.core.has_work()
        kept.append("x")
        assert parts.core.has_work()
        kept.clear()
    parts.core._preparing["r"] = request("r", [1], 1)
    assert parts.core.has_work()
    parts.core.abort("r")
    assert not parts.core.has_work() and parts.asked == [("abort", "r"), ("forget", "r")]


def test_what_an_idle_engine_keeps() -> None:
    parts = Parts()
    with pytest.raises(HeadwayError, match="of 2 former requests are still kept"):
        parts.core.check_integrity()
    parts.runner.admissions.num_prepared = 0
    parts.core.check_integrity()
    parts.core._meter.arrived("r", True)
    with pytest.raises(HeadwayError, match="of 1 former requests"):
        parts.core.check_integrity()
    assert parts.asked == ["checked"] * 3


def test_the_order_of_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """Launched steps are waited for, oldest first, then memory is let go of, then what the engine owns; a lost rank's steps are
    not waited for. Waits of the host are told."""
    counts: dict[str, int] = {}
    parts = Parts(waits=SimpleNamespace(counts=lambda: counts, text=lambda: "line 3"))
    parts.core._waits.close = lambda: parts.asked.append("off")
    owned = ExitStack()
    owned.callback(parts.asked.append, "owned")
    parts.core.close_at_shutdown(owned)
    parts.core._in_flight += ["one", "two"]
    with caplog.at_level("WARNING", "headway"):
        parts.core.shutdown()
        assert not caplog.records
        counts["item"] = 1
        parts.core.shutdown()
    assert parts.asked[:5] == [("collect", "one"), ("collect", "two"), "released", "off", "owned"]
    assert [record.getMessage() for record in caplog.records] == ["unexpected host waits in the loop:\nline 3"]
    lost = Parts()
    lost.core._in_flight.append("one")
    lost.runner.is_lost = True
    lost.core.shutdown()
    assert lost.asked == ["released"]


def test_what_is_owned_is_let_go_of_whatever_happens() -> None:
    parts = Parts()
    owned = ExitStack()
    owned.callback(parts.asked.append, "owned")
    parts.core.close_at_shutdown(owned)

    def fails() -> None:
        raise DeviceError("gone")

    parts.runner.release = fails
    with pytest.raises(DeviceError):
        parts.core.shutdown()
    assert parts.asked == ["owned"]
