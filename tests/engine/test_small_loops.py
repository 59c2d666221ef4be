"""The meter's arithmetic, the engine process's loop and interrupts: what stands around the host loop, without an engine."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, InvalidRequestError
from headway.core.messages import EngineStats, RequestUpdate, StepUpdates
from headway.device.step_clock import StepTimes
from headway.engine import channel, child, client, metrics
from headway.engine.metrics import StepMeter
from tests.engine.harness import request

# -- the meter ---------------------------------------------------------------------------------------------------------


class Ticks:
    """A clock that says what it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    made = Ticks()
    monkeypatch.setattr(metrics, "perf_counter", made)
    return made


def plan(
    step: int, rows: int, decode: int, tokens: int, names: tuple[str, ...] = (), texts: tuple[str, ...] = ()
) -> Any:
    admitted = [SimpleNamespace(request=SimpleNamespace(request_id=name)) for name in names]
    whole = SimpleNamespace(request_ids=list(texts)) if texts else None
    return SimpleNamespace(
        step=step, num_rows=rows, num_decode_rows=decode, num_tokens=tokens, admissions=admitted, texts=whole
    )


def stepped(meter: StepMeter, ticks: Ticks, one: Any, at: float, events: Any = None, replayed: bool = False) -> Any:
    """Schedule for 2 s, launch for 3, wait from 10 to 14 s, and apply for 5: all from ``at`` on."""
    ticks.now = at
    meter.begin()
    ticks.now = at + 2
    meter.scheduled()
    ticks.now = at + 5
    step: Any = SimpleNamespace(events=events)
    meter.launched(one, step, replayed)
    ticks.now = at + 19
    return meter.applied(step, at + 10, at + 14)


def test_times_of_a_step(ticks: Ticks) -> None:
    meter, stats = StepMeter(SimpleNamespace(), 2), EngineStats()  # type: ignore[arg-type]
    trace = stepped(meter, ticks, plan(7, 3, 2, 9), 100.0, replayed=True)
    assert (trace.step, trace.rows, trace.tokens, trace.replayed, trace.begun) == (7, 3, 9, True, 100.0)
    assert (trace.schedule_us, trace.launch_us, trace.submitted_us) == (2e6, 3e6, 2e6)
    assert (trace.wait_begun_us, trace.wait_us, trace.apply_us) == (10e6, 4e6, 5e6)
    assert trace.headway_us is trace.idle_us is trace.busy_us is None, "there is no clock"
    other = stepped(meter, ticks, plan(8, 4, 4, 99), 200.0)
    assert (other.rows, other.tokens, other.replayed) == (4, 4, False), "rows that decode bring a token each"
    last = stepped(meter, ticks, plan(9, 1, 0, 1), 300.0)
    meter.fill(stats)
    assert (stats.schedule_seconds, stats.launch_seconds, stats.apply_seconds) == (6.0, 9.0, 15.0)
    assert (stats.host_step_seconds.total, stats.host_step_seconds.count) == (30.0, 3)
    assert (stats.rows_per_step.total, stats.tokens_per_step.total, stats.rows_per_step.count) == (8.0, 14.0, 3)
    assert stats.recent_steps == [other, last], "the latest ones, oldest first"
    assert (stats.num_timed_steps, stats.device_busy_seconds) == (0, 0.0)


def test_times_of_the_device(ticks: Ticks) -> None:
    """The first step after a rest says nothing of how far the host was ahead."""
    told = [
        StepTimes(0.0, 9.0, 4.0),
        None,
        StepTimes(5.0, 0.0, 2.0),
        StepTimes(0.0, 3.0, 1.0),
        StepTimes(0.0, 7.0, 8.0),
    ]
    clock: Any = SimpleNamespace(measure=lambda events: told.pop(0))
    meter, stats = StepMeter(clock, 64), EngineStats()
    events = SimpleNamespace(submitted_at=0.0)
    for number in range(5):
        if number == 4:
            meter.arrived("late", True)
        events.submitted_at = 100.0 * number + 4
        trace = stepped(meter, ticks, plan(number, 1, 1, 1), 100.0 * number, events)
        assert trace.submitted_us == 4e6
        times = [(0.0, None, 4.0), (None, None, None), (5.0, 0.0, 2.0), (0.0, 3.0, 1.0), (0.0, None, 8.0)][number]
        assert (trace.headway_us, trace.idle_us, trace.busy_us) == times
    meter.fill(stats)
    assert (stats.num_timed_steps, stats.num_dry_steps) == (2, 1)
    assert stats.device_busy_seconds == pytest.approx(15e-6) and stats.device_idle_seconds == pytest.approx(3e-6)
    assert stats.device_step_seconds.total == pytest.approx(15e-6) and stats.device_step_seconds.count == 4
    assert stats.headway_seconds.total == pytest.approx(5e-6) and stats.headway_seconds.count == 2


def test_how_long_requests_waited_is_told_once(ticks: Ticks) -> None:
    """Up to the moment at which the step that takes them in was planned; of texts in columns, too."""
    meter = StepMeter(SimpleNamespace())  # type: ignore[arg-type]
    for at, name in ((10.0, "a"), (11.0, "b"), (12.0, "c"), (13.0, "d")):
        ticks.now = at
        meter.arrived(name, False)
    meter.forget("d")
    assert meter.num_kept == 3
    stepped(meter, ticks, plan(0, 1, 0, 1, ("a", "strange")), 20.0)
    updates = StepUpdates(["x", "a"], [1, 2], {1: RequestUpdate(request_id="a", new_token_ids=[2])})
    meter.stamp(updates)
    assert updates.more[1].queue_seconds == 12.0 and updates.queue_seconds == []
    meter.stamp(updates)
    assert updates.more[1].queue_seconds == 12.0, "nothing is kept any more that could tell"
    stepped(meter, ticks, plan(1, 2, 0, 2, texts=("b", "c")), 30.0)
    whole = StepUpdates(["c", "b", "y"], [0, 0, 0])
    whole.width = 2
    meter.stamp(whole)
    assert whole.queue_seconds == [20.0, 21.0, None] and meter.num_kept == 0


# -- the engine's process ----------------------------------------------------------------------------------------------


class Core:
    """Notes what it is asked."""

    info = SimpleNamespace()

    def __init__(self, steps: int = 0, **more: Any) -> None:
        self.calls, self.left = list[Any](), steps
        for name, value in more.items():
            setattr(self, name, value)

    def learn(self, vocabulary: Vocabulary) -> None:
        self.calls.append(("learn", vocabulary.size))

    def add(self, one: Any) -> None:
        if one.request_id == "bad":
            raise InvalidRequestError("no")
        self.calls.append(("add", one.request_id))
        self.left = 2

    def abort(self, name: str) -> None:
        self.calls.append(("abort", name))

    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> StepUpdates:
        self.left -= 1
        self.calls.append("step")
        updates = StepUpdates()
        if not self.left:
            updates.add([RequestUpdate(request_id="good", new_token_ids=[1], finish_reason="stop")])
        return updates

    def stats(self) -> EngineStats:
        return EngineStats(num_running=5)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Sockets:
    """Commands by turns, and what was said."""

    def __init__(self, *turns: list[Any]) -> None:
        self.turns, self.asked, self.said = list(turns), list[Any](), list[Any]()
        self.stats = SimpleNamespace(send=lambda data: self.said.append(channel.decode_stats(data)))

    def receive(self, block: bool, most_ms: int | None = None, wakes: int | None = None) -> list[Any]:
        self.asked.append((block, most_ms, wakes))
        return self.turns.pop(0)

    def report(self, report: Any) -> None:
        self.said.append(report)


def test_commands_are_done_in_their_order_and_updates_told() -> None:
    core = Core()
    vocabulary = Vocabulary.of([b"a", b"b"])
    first = [
        channel.Learn(vocabulary),
        channel.Add([request("good", [1]), request("bad", [1])]),
        channel.Abort(["x", "y"]),
    ]
    sockets: Any = Sockets(first, [channel.StatsRequest()], [], [channel.Shutdown(), channel.Abort(["late"])])
    child.serve(core, sockets)  # type: ignore[arg-type]
    assert core.calls == [("learn", 2), ("add", "good"), ("abort", "x"), ("abort", "y"), "step", "step"]
    assert sockets.asked == [(True, None, None), (False, None, None), (True, None, None), (True, None, None)]
    refused, stats, done = sockets.said
    assert [(each.request_id, each.finish_reason, each.error) for each in refused.updates] == [("bad", "error", "no")]
    assert stats.num_running == 5 and [each.request_id for each in done.updates] == ["good"]


def test_an_engine_of_several_ranks_looks_up_now_and_then() -> None:
    sockets: Any = Sockets([channel.Shutdown()])
    child.serve(Core(watches=True, wakes=7), sockets)  # type: ignore[arg-type]
    assert sockets.asked == [(True, child.WATCH_MS, 7)]


def test_an_engine_without_work_sleeps_until_a_command_or_a_letter_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turning in place of it would give the same answers, and take a core."""
    sockets = child.Sockets(str(tmp_path))
    sender = sockets.context.socket(zmq.PUSH)
    sender.connect(f"ipc://{tmp_path}/commands")
    mine, others = socket.socketpair()
    slept: list[int | None] = []

    class Poller(zmq.Poller):
        def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
            """What is sent comes when somebody sleeps."""
            slept.append(timeout)
            wakes()
            return super().poll(timeout)

    def letter() -> None:
        others.send(b"x")

    def command() -> None:
        mine.recv(1)
        sender.send(channel.encode(channel.Shutdown()))

    monkeypatch.setattr(zmq, "Poller", Poller)
    wakes = letter
    assert sockets.receive(True, 60_000, mine.fileno()) == []
    wakes = command
    assert sockets.receive(True, 60_000, mine.fileno()) == [channel.Shutdown()]
    assert slept == [60_000] * 2
    sender.close(0)
    sockets.close()
    mine.close()
    others.close()


def test_a_child_reports_how_it_began_and_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    core, loaded = Core(info=None), list[Any]()

    def load(*given: Any) -> Any:
        loaded.append(given)
        if given[0] == "broken":
            raise ConfigError("cannot be")
        return core

    monkeypatch.setattr(child, "load_core", load)
    monkeypatch.setattr("gc.freeze", lambda: None)
    boot = channel.Boot(EngineArgs(model="x"), "m:f")
    whole: Any = Sockets([boot], [channel.Shutdown()])
    assert child.run(whole) == 0 and core.calls == ["shutdown"] and loaded == [("m:f", boot.args, None)]
    assert [type(each) for each in whole.said] == [channel.Ready]
    early: Any = Sockets([boot, channel.Shutdown()])
    assert child.run(early) == 0 and early.said == [] and len(loaded) == 1, "nobody waits for it any more"
    for turn, kind, says in (
        ([channel.Boot(EngineArgs(model="x"), "broken")], "ConfigError", "cannot be"),
        ([channel.StatsRequest()], "TypeError", "expected Boot, got StatsRequest"),
    ):
        failing: Any = Sockets(turn)
        assert child.run(failing) == 1
        [dead] = failing.said
        assert dead.kind == kind and says in dead.message
    core.calls.clear()
    broken: Any = Sockets([boot], [])
    core.left = 1
    monkeypatch.setattr(core, "step", lambda: 1 / 0)
    assert child.run(broken) == 1 and core.calls == ["shutdown"]
    assert broken.said[-1].kind == "ZeroDivisionError" and "Traceback" in broken.said[-1].message


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), client.interrupt_held_back():
        signal.raise_signal(signal.SIGINT)
        done.append("held back")
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["held back"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with client.interrupt_held_back():
        done.append("nobody interrupts")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts")
def test_handlers_of_others_and_other_threads_are_left_alone() -> None:
    seen: list[int] = []
    own = lambda number, frame: seen.append(number)  # noqa: E731 - compared by identity
    signal.signal(signal.SIGINT, own)
    with client.interrupt_held_back():
        assert signal.getsignal(signal.SIGINT) is own
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: list[Any] = []

    def elsewhere() -> None:
        with client.interrupt_held_back():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
