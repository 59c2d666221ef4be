"""A device that computes nothing: every graph takes a given time on a clock that waiting moves on by itself.

Under it the engine's loop runs as over a GPU whose step takes that long, with full queues and back-pressure, but no time is
spent on waiting: what is left of the wall's time is the host's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from headway.device.base import Event, Graph, Stream


class PacedClock:
    """Seconds since the clock was made, plus all that was waited for.

    Args:
        host: seconds of the host, monotonic.
        waits: "skip": no time passes; "sleep" or "spin": all of it, and what the host does next finds cold caches, as it
            would over a GPU.
    """

    def __init__(
        self, host: Callable[[], float] = time.perf_counter, waits: Literal["skip", "sleep", "spin"] = "skip"
    ) -> None:
        self._host, self._skipped, self._waits = host, 0.0, waits

    def now(self) -> float:
        """The time on host and device."""
        return self._host() + self._skipped

    def wait_until(self, moment: float) -> None:
        """It is ``moment``, at least."""
        if self._waits == "sleep":
            time.sleep(max(moment - self.now(), 0.0))
        while self._waits == "spin" and self.now() < moment:
            pass
        self._skipped += max(moment - self.now(), 0.0)


class PacedStream:
    """A stream: ``free_at`` is when its work so far is done."""

    def __init__(self, clock: PacedClock) -> None:
        self._clock, self.free_at = clock, 0.0

    def wait_event(self, event: Event) -> None:
        """Later work starts after the event."""
        assert isinstance(event, PacedEvent)
        self.free_at = max(self.free_at, event.passes_at)

    def active(self) -> AbstractContextManager[object]:
        """Operations outside of graphs take no time, and run as they come."""
        return nullcontext()

    def work(self, seconds: float) -> None:
        """Queue work."""
        self.free_at = max(self.free_at, self._clock.now()) + seconds


class PacedEvent:
    """An event that knows when it passes."""

    def __init__(self, clock: PacedClock) -> None:
        self._clock, self.passes_at = clock, 0.0

    def record(self, stream: Stream) -> None:
        """It passes when the stream's work so far is done."""
        assert isinstance(stream, PacedStream)
        self.passes_at = max(stream.free_at, self._clock.now())

    def query(self) -> bool:
        """Whether its time has come."""
        return self._clock.now() >= self.passes_at

    def synchronize(self) -> None:
        """The clock moves on."""
        self._clock.wait_until(self.passes_at)

    def elapsed_us(self, later: Event) -> float:
        """Microseconds to ``later``."""
        assert isinstance(later, PacedEvent)
        return (later.passes_at - self.passes_at) * 1e6


class PacedGraph:
    """Takes ``device.step_seconds``, and does nothing."""

    def __init__(self, device: PacedDevice, stream: PacedStream) -> None:
        self._device, self._stream = device, stream

    def replay(self) -> None:
        """Queue it. A graph of a split step's tail is counted like a step."""
        self._stream.work(self._device.step_seconds)


class PacedDevice:
    """See the module, and ``headway.device.base.Device``.

    Attributes:
        step_seconds: what one replay of any graph takes.
    """

    pins_memory = True
    asynchronous = True
    captures_graphs = True
    compiles_kernels = False

    def __init__(self, step_seconds: float, clock: PacedClock | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.step_seconds = step_seconds
        self.time = clock or PacedClock()
        self._main, self._copies = PacedStream(self.time), PacedStream(self.time)
        self.main: Stream = self._main
        self.copies: Stream = self._copies
        self.clock: Stream | None = PacedStream(self.time)
        self.notes: list[str] = []

    def new_event(self, timing: bool = False) -> Event:
        """An event."""
        return PacedEvent(self.time)

    def new_stream(self) -> Stream:
        """A further stream, as free as the others."""
        return PacedStream(self.time)

    def joined(self) -> AbstractContextManager[object]:
        """Nothing is a thread's own."""
        return nullcontext()

    def host_ints(self, num_ints: int) -> torch.Tensor:
        """Plain memory."""
        return torch.zeros(num_ints, dtype=torch.int32)

    def capture(self, body: Callable[[], object], *, first: Graph | None = None, reused: bool = False) -> Graph:
        """``body`` runs once: its results have their shapes, and never change."""
        body()
        return PacedGraph(self, self._main)

    def memory_bytes(self) -> tuple[int, int]:
        """A small card, always empty."""
        return 2 * 2**30, 2 * 2**30

    def peak_bytes(self) -> int:
        """Not measured."""
        return 0

    def reset_peak(self) -> None:
        """Nothing is measured."""

    def wait_idle(self) -> None:
        """The clock moves on."""
        self.time.wait_until(max(self._main.free_at, self._copies.free_at))

    def close(self) -> None:
        """Nothing to undo."""
