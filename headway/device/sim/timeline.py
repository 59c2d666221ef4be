"""Streams, events and the order in which queued work runs: anything that CUDA would allow, chosen by a seed.

Nothing runs when it is queued, except as far as the seed lets a stream hurry. Work runs when the host waits for it, no
earlier than it must on slow streams, and queued work of other streams may run before or after as it pleases.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes

from headway.device.base import Event, Stream
from headway.device.sim.clocks import Clock, merge
from headway.device.sim.errors import HostSyncError, Place, RaceError, SimError, here
from headway.device.sim.memory import Access, Memory

HOST = "host"
SPEEDS = (0.0, 0.0, 0.3, 0.5, 0.6, 1.0)
"""Chance that a stream runs one more item whenever the host gives it time; 0: only when somebody waits."""
MAX_POLLS = 200
"""An event that is asked about this often without anything else happening does pass in the end."""


@dataclass(slots=True)
class Task:
    """Work on the device.

    Attributes:
        accesses: what it reads and writes; a function where that depends on data, called when the task runs.
        clock, seq: what its stream knew when it was queued, and its number there.
    """

    name: str
    run: Callable[[], None]
    accesses: list[Access] | Callable[[], list[Access]]
    place: Place
    clock: Clock = field(default_factory=dict)
    seq: int = 0


@dataclass(slots=True)
class Mark:
    """One recording of an event.

    Attributes:
        time: how many operations had been executed when it passed.
        patience: questions about it still to be answered with no, on the clock stream.
    """

    stream: SimStream
    clock: Clock
    done: bool = False
    time: int = 0
    patience: int = 0


@dataclass(slots=True)
class Wait:
    """The stream goes on after ``mark``."""

    mark: Mark


class SimStream:
    """A queue of simulated work. See ``device.base.Stream``."""

    def __init__(self, timeline: Timeline, name: str, speed: float) -> None:
        self._timeline, self.name, self.speed = timeline, name, speed
        self.queue: deque[Task | Mark | Wait] = deque()
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        """Later work here starts after the event's latest recording."""
        assert isinstance(event, SimEvent)
        if self._timeline.capturing is not None:
            self._timeline.capturing.wait(self, event)
            return
        if event.mark is not None:
            merge(self.clock, event.mark.clock)
            if not event.mark.done:
                self.queue.append(Wait(event.mark))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Operations are queued here; blocking calls are refused."""
        timeline = self._timeline
        previous, timeline.current = timeline.current, self
        timeline.depth += 1
        try:
            yield
        finally:
            timeline.current = previous
            timeline.depth -= 1

    def blocked_on(self) -> Mark | None:
        """The recording that the head of the queue waits for."""
        head = self.queue[0]
        return head.mark if isinstance(head, Wait) and not head.mark.done else None


class SimEvent:
    """A point in a stream's work. See ``device.base.Event``."""

    def __init__(self, timeline: Timeline, timing: bool = False) -> None:
        self._timeline, self._timing = timeline, timing
        self.mark: Mark | None = None
        self._polls = 0

    def record(self, stream: Stream) -> None:
        """Mark the work queued on ``stream`` so far; earlier recordings are forgotten."""
        assert isinstance(stream, SimStream)
        if self._timeline.capturing is not None:
            self._timeline.capturing.record(self, stream)
            return
        if stream is self._timeline.clock:
            self.mark = self._timeline.tick()
            return
        merge(stream.clock, self._timeline.host)
        self.mark = Mark(stream, dict(stream.clock))
        self._polls = 0
        stream.queue.append(self.mark)

    def query(self) -> bool:
        """Whether the host may rely on the work being done: late, but not for ever."""
        if self.mark is not None and self.mark.stream is self._timeline.clock:
            self.mark.done = self.mark.done or self.mark.patience == 0
            self.mark.patience -= 1
            return self.mark.done
        self._timeline.progress()
        if self.mark is None:
            return True
        self._polls += 1
        if not self.mark.done and self._polls > MAX_POLLS:
            self._timeline.run_until(self.mark)
        if self.mark.done:
            merge(self._timeline.host, self.mark.clock)
        return self.mark.done

    def synchronize(self) -> None:
        """Run what the event stands for. Refused to all but the readback once the device is armed."""
        timeline = self._timeline
        place = here()
        if timeline.depth or (timeline.armed and not place.file.endswith("device/readback.py")):
            timeline.refuse(f"event.synchronize() blocks the host at {place}")
        timeline.host_waits += 1
        if self.mark is not None:
            timeline.run_until(self.mark)
            merge(timeline.host, self.mark.clock)

    def elapsed_us(self, later: Event) -> float:
        """Operations executed between the two, one a microsecond. Both must have passed as far as the host can know."""
        assert isinstance(later, SimEvent)
        return float(later.passed_at() - self.passed_at())

    def passed_at(self) -> int:
        """The time of an event that the host knows to have passed; anything else is refused."""
        timeline, mark = self._timeline, self.mark
        if not self._timing:
            timeline.refuse(f"elapsed time of an event made without timing at {here()}", SimError)
        if mark is None or not mark.done or any(timeline.host.get(who, 0) < n for who, n in mark.clock.items()):
            timeline.refuse(f"elapsed time of an event that the host does not know to have passed at {here()}")
        return mark.time


class Capture:
    """A graph that is being captured: what is queued on the stream of the capture, and on those that follow it by events.

    Attributes:
        items: in the order of queueing: work and its stream, recordings and waits of events.
        memories: what was allocated meanwhile.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.items: list[tuple[SimStream, Task | SimEvent, bool]] = []  # True: the stream waits for the event
        self.memories: list[Memory] = []
        self._timeline = timeline
        self._queued = {timeline.main: 0}  # of the streams that belong to it
        self._joined = {timeline.main: 0}  # how much of that is known to be over when the main stream's work is
        self._recorded: dict[SimEvent, tuple[SimStream, int]] = {}

    def add(self, stream: SimStream, task: Task) -> None:
        """Work on a stream."""
        if stream not in self._queued:
            self._timeline.refuse(f"work on {stream.name} that does not follow the capture at {task.place}", SimError)
        self._queued[stream] += 1
        self.items.append((stream, task, False))

    def record(self, event: SimEvent, stream: SimStream) -> None:
        """Refused on streams that the capture has not got to."""
        if stream not in self._queued:
            self._timeline.refuse_in_capture("event.record")
        self._recorded[event] = stream, self._queued[stream]
        self.items.append((stream, event, False))

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        """The stream belongs to the capture from here on."""
        if event not in self._recorded:
            self._timeline.refuse_in_capture("wait_event")
        of, number = self._recorded[event]
        self._queued.setdefault(stream, 0)
        if stream is self._timeline.main:
            self._joined[of] = max(number, self._joined.get(of, 0))
        self.items.append((stream, event, True))

    def check_joined(self) -> None:
        """At its end the main stream must have waited for all others."""
        for stream, number in self._queued.items():
            if stream is not self._timeline.main and self._joined.get(stream, 0) < number:
                self._timeline.refuse(
                    f"a graph capture ends with work on {stream.name} that nothing waits for", SimError
                )


class Timeline:
    """All streams of a device, and the host.

    Args:
        seed: chooses the streams' speeds (unless given) and every interleaving.
        speeds: of main and copies.

    Attributes:
        current: stream that operations are queued on; "default" outside of any ``active``, as on CUDA.
        depth: how many ``active`` scopes are open.
        armed: blocking calls are refused outside of them too.
        host: the host's clock.
        capturing: the graph being captured.
        violations: every error raised so far; a caller may have swallowed some.
        host_waits: waits for events and blocking copies.
    """

    def __init__(self, seed: int, speeds: tuple[float, float] | None) -> None:
        self.rng = random.Random(seed)
        chosen = speeds or (self.rng.choice(SPEEDS), self.rng.choice(SPEEDS))
        self.main = SimStream(self, "main", chosen[0])
        self.copies = SimStream(self, "copies", chosen[1])
        self.default = SimStream(self, "default", self.rng.choice(SPEEDS))
        self.streams = [self.main, self.copies, self.default]
        self.clock = SimStream(self, "clock", 0.0)
        self._ticks = 0
        self.poison_int = 0
        self.current, self.depth, self.armed = self.default, 0, False
        self.host: Clock = {HOST: 1}
        self.capturing: Capture | None = None
        self.violations: list[SimError] = []
        self.host_waits = 0
        self.num_executed = 0
        self.closed = False

    def new_stream(self) -> SimStream:
        """A further one."""
        self.streams.append(SimStream(self, f"side {len(self.streams)}", self.rng.choice(SPEEDS)))
        return self.streams[-1]

    # -- queueing --------------------------------------------------------------------------------------------------

    def enqueue(self, task: Task, stream: SimStream | None = None) -> None:
        """Queue ``task`` on the current stream (or the given one), or add it to the graph being captured."""
        stream = stream or self.current
        if self.capturing is not None:
            self.capturing.add(stream, task)
        else:
            self._put(task, stream)

    def _put(self, task: Task, stream: SimStream) -> None:
        merge(stream.clock, self.host)
        task.seq = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        task.clock = dict(stream.clock)
        stream.queue.append(task)

    def free(self, memory: Memory) -> None:
        """The last tensor over ``memory`` is gone: from here on in its stream's order anyone may get it."""
        if self.closed:
            return
        place = here()

        def run() -> None:
            memory.poison(self.poison_int)
            if memory.graph is None:
                memory.freed = place

        whole = Access(memory, 0, memory.flat.nbytes, True)
        stream = next(stream for stream in self.streams if stream.name == memory.stream)
        if memory.graph is not None:
            if self.capturing is not None and memory.graph is self.capturing:
                self.capturing.add(stream, Task("free", run, [whole], place))
            return  # a captured graph's memory stays its own
        # Not by way of ``capturing``: the garbage collector frees on whatever thread it runs, another rank's for one.
        self._put(Task("free", run, [whole], place), stream)

    def refuse(self, message: str, kind: type[SimError] = HostSyncError) -> NoReturn:
        """Raise, and remember."""
        error = kind(message)
        self.violations.append(error)
        raise error

    def refuse_in_capture(self, what: str) -> None:
        """Captured graphs of ours hold kernels only."""
        if self.capturing is not None:
            self.refuse(f"{what} inside a graph capture at {here()}", SimError)

    @property
    def strict(self) -> bool:
        """Whether blocking copies are refused."""
        return self.armed or self.depth > 0

    def tick(self) -> Mark:
        """An event on the clock stream passes at once, and the host knows when it asks; or later, as it legally may."""
        self._ticks += 1
        return Mark(self.clock, {}, time=self.num_executed, patience=int(self._ticks % 7 == 0))

    # -- running ---------------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Time passes on the host: fast streams get some work done."""
        if self.capturing is not None:
            return
        streams = self.rng.sample(self.streams, len(self.streams))
        if not any(stream.speed and self._runnable(stream) for stream in streams):
            return
        with _plainly():
            for stream in streams:
                while stream.speed and self._runnable(stream) and self.rng.random() < stream.speed:
                    self._step(stream)

    def run_until(self, mark: Mark) -> None:
        """Run what ``mark`` needs, and whatever else the seed likes."""
        eagerness = self.rng.choice((0.0, 0.3))
        with _plainly():
            while not mark.done:
                stream = mark.stream
                while (blocker := stream.blocked_on()) is not None:
                    stream = blocker.stream
                if eagerness and self.rng.random() < eagerness:
                    stream = self.rng.choice([each for each in self.streams if self._runnable(each)])
                self._step(stream)

    def run_all(self) -> None:
        """Drain every stream; the host knows of all of it afterwards."""
        with _plainly():
            while candidates := [stream for stream in self.streams if self._runnable(stream)]:
                self._step(self.rng.choice(candidates))
        for stream in self.streams:
            merge(self.host, stream.clock)

    def _runnable(self, stream: SimStream) -> bool:
        return bool(stream.queue) and stream.blocked_on() is None

    def _step(self, stream: SimStream) -> None:
        item = stream.queue.popleft()
        if isinstance(item, Mark):
            item.done, item.time = True, self.num_executed
        elif isinstance(item, Task):
            self._execute(stream.name, item)

    def _execute(self, who: str, task: Task) -> None:
        self.num_executed += 1
        try:
            accesses = task.accesses if isinstance(task.accesses, list) else task.accesses()
            for each in accesses:
                self.check(each, who, task)
            task.run()
        except SimError as error:
            if error not in self.violations:
                self.violations.append(error)
            raise

    # -- races -----------------------------------------------------------------------------------------------------

    def check(self, each: Access, who: str, task: Task) -> None:
        """Record one access of a task that runs now. Raises RaceError when it is not ordered after an earlier one."""
        memory, low, high, is_write = each
        if memory.freed is not None and task.name != "free":
            raise RaceError(f"{task.name} at {task.place} uses memory that was freed at {memory.freed}")
        seen = memory.log.conflict(who, task.clock, low, high, is_write)
        if seen is not None:
            raise RaceError(
                f"{task.name} ({who}) {_verb(is_write)} memory of {memory.place}\n  at {task.place}\n"
                f"while {seen.who} {_verb(seen.is_write)} it\n  at {seen.place}\nand nothing orders the two"
            )
        memory.log.add(who, task.seq, task.place, low, high, is_write)

    def check_host(self, each: Access, place: Place) -> None:
        """The host reads or writes page-locked memory now."""
        memory, low, high, is_write = each
        for stream in self.streams:
            for item in stream.queue:
                if isinstance(item, Task) and isinstance(item.accesses, list):
                    for other in item.accesses:
                        overlap = other.memory is memory and other.low < high and low < other.high
                        if overlap and (other.is_write or is_write):
                            self._host_race(is_write, place, stream.name, other.is_write, item.place)
        seen = memory.log.conflict(HOST, self.host, low, high, is_write)
        if seen is not None:
            self._host_race(is_write, place, seen.who, seen.is_write, seen.place)

    def _host_race(self, is_write: bool, place: Place, who: str, wrote: bool, other: Place) -> None:
        self.refuse(
            f"the host {_verb(is_write)} a page-locked buffer\n  at {place}\nwhile a copy on {who} {_verb(wrote)} it\n"
            f"  queued at {other}\nand the host has not waited for that copy's event",
            RaceError,
        )


@contextmanager
def _plainly() -> Iterator[None]:
    """Inside, operations are plain CPU ones: tasks are run, not queued."""
    with torch.inference_mode(), _disable_current_modes(), DisableTorchFunction():
        yield


def _verb(is_write: bool) -> str:
    return "writes" if is_write else "reads"
