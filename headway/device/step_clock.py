"""When the device was busy, dry or ahead, from two timing events a step. Nothing here ever waits.

``ended`` is recorded on ``main`` behind a step's last kernel. ``submitted`` is recorded on ``device.clock``, a stream on
which nothing else is ever queued, just before the step's first work goes to ``main``: it passes at once, so its time is
the device's time at the moment of submission. The distance from ``submitted`` of a step to ``ended`` of the step before
is the whole story: positive, it is the headway, the work that was still queued; negative, the device had run dry and
stood idle for that long.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from headway.device.base import Device, Event


@dataclass(slots=True)
class StepEvents:
    """The two events of a launched step, and the host's time (``time.perf_counter``) beside the first."""

    submitted: Event
    ended: Event
    submitted_at: float = 0.0


class StepTimes(NamedTuple):
    """One step in device microseconds.

    Attributes:
        headway: work still queued when it was submitted; 0 when the device had run dry.
        idle: time the device had stood idle by then; 0 when it had not.
        busy: from its start on the device to its end.
    """

    headway: float
    idle: float
    busy: float


class StepClock:
    """Hands out events and measures steps in the order they were launched. On a device without a clock it does nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[StepEvents] = []
        self._last: StepEvents | None = None

    def submit(self) -> StepEvents | None:
        """Note that a step's first work is about to be queued; ``ended`` is the caller's to record. None without a clock."""
        clock = self._device.clock
        if clock is None:
            return None
        if self._free:
            events = self._free.pop()
        else:
            events = StepEvents(self._device.new_event(timing=True), self._device.new_event(timing=True))
        events.submitted_at = time.perf_counter()
        events.submitted.record(clock)
        return events

    def measure(self, events: StepEvents) -> StepTimes | None:
        """Times of a step whose result has arrived on the host, so ``ended`` has passed; each step once, oldest first.

        None where ``submitted`` has not visibly passed, which a device may do: the step then goes unmeasured.
        """
        before, self._last = self._last, events
        times = None
        if events.submitted.query():
            if before is None:
                times = StepTimes(0.0, 0.0, events.submitted.elapsed_us(events.ended))
            else:
                lead = events.submitted.elapsed_us(before.ended)
                idle = max(-lead, 0.0)
                times = StepTimes(max(lead, 0.0), idle, before.ended.elapsed_us(events.ended) - idle)
        if before is not None:
            self._free.append(before)
        return times
