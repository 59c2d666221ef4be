"""Streams, events and graphs of the pretended device. What is asked of them has always happened already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self

import torch

from headway.syncs.findings import Kind
from headway.syncs.live import SPINS
from headway.syncs.sim import backend
from headway.syncs.sim.tensor import COUNT, TAPE

PENDING_QUERIES: Final = 10
"""Work is found unfinished this often, so that loops around query() show themselves and still end."""

Report = Callable[[Kind, str], None]


class _Pending:
    """Answers queries: "not yet" PENDING_QUERIES times after ``begin``."""

    def __init__(self) -> None:
        self.left = 0

    def begin(self) -> None:
        self.left = PENDING_QUERIES

    def query(self, report: Report, label: str) -> bool:
        self.left = max(self.left - 1, 0)
        if self.left == PENDING_QUERIES - SPINS:
            report(Kind.QUERY, label)
        return self.left == 0


class SimEvent:
    """An event that has passed after PENDING_QUERIES queries or one wait."""

    report: Report
    device = property(lambda self: backend.visible())

    def __init__(self, *_: Any, **__: Any) -> None:
        self._pending = _Pending()
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._pending.begin()
        self._at = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Streams wait, hosts do not."""

    def query(self) -> bool:
        return self._pending.query(type(self).report, "Event.query")

    def synchronize(self) -> None:
        self._pending.left = 0
        type(self).report(Kind.EVENT, "Event.synchronize")

    def elapsed_time(self, end: SimEvent) -> float:
        """Milliseconds of host time between the two records."""
        return (end._at - self._at) * 1e3


class SimStream:
    """A stream on which everything has already happened, though queries find new work unfinished at first."""

    report: Report
    event: type[SimEvent]
    current: Current
    device = property(lambda self: backend.visible())
    device_index = property(lambda self: backend.STATE.index)
    device_type = 1
    stream_id = 0
    cuda_stream = 0

    def __init__(self, device: object = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self._pending = _Pending()
        self._seen = COUNT.made

    def synchronize(self) -> None:
        self._pending.left, self._seen = 0, COUNT.made
        type(self).report(Kind.STREAM, "Stream.synchronize")

    def query(self) -> bool:
        if self._seen != COUNT.made:
            self._seen = COUNT.made
            self._pending.begin()
        return self._pending.left == 0 or self._pending.query(type(self).report, "Stream.query")

    def is_capturing(self) -> bool:
        return TAPE.steps is not None

    def wait_event(self, event: object) -> None:
        """Streams wait, hosts do not."""

    def wait_stream(self, stream: object) -> None:
        """Streams wait, hosts do not."""

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        event = event or type(self).event()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        type(self).current.stack.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        type(self).current.stack.pop()


class Current(threading.local):
    """The stream that each thread works on."""

    def __init__(self) -> None:
        self.stack: list[SimStream] = []


class SimGraph:
    """A CUDA graph: operations run while they are captured, and again, into the same tensors, at each replay."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[Callable[[], None]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self._steps = TAPE.steps = []

    def capture_end(self) -> None:
        TAPE.steps = None

    def replay(self) -> None:
        with torch.no_grad():
            for step in self._steps:
                step()

    def reset(self) -> None:
        self._steps = []

    def instantiate(self) -> None:
        """There is nothing to compile."""

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def enable_debug_mode(self) -> None:
        """There is no graph to look at."""


class Capture:
    """``torch.cuda.graph``, which waits for the whole device before it captures."""

    report: Report

    def __init__(self, cuda_graph: SimGraph, *_: Any, **__: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        type(self).report(Kind.DEVICE, "torch.cuda.graph")
        self._graph.capture_begin()

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
