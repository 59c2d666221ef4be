"""R4: a staging buffer is not handed out again while a copy that reads it may be pending."""

from __future__ import annotations

import torch

from headway.device.base import Event, Stream
from headway.device.cpu import CpuDevice
from headway.device.staging import StagingRing


class ManualEvent:
    """An event that passes when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def record(self, stream: Stream) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("staging must never wait")

    def elapsed_us(self, later: Event) -> float:
        return 0.0


class SlowDevice(CpuDevice):
    """Copies whose completion the test controls."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[ManualEvent] = []

    def new_event(self, timing: bool = False) -> Event:
        self.events.append(ManualEvent())
        return self.events[-1]


def test_grows_instead_of_reusing_or_waiting() -> None:
    device = SlowDevice()
    ring = StagingRing(device, torch.zeros(8, dtype=torch.int32))
    first = ring.acquire()
    ring.send(first, 4)
    second = ring.acquire()
    assert second.tensor.data_ptr() != first.tensor.data_ptr()
    ring.send(second, 4)
    device.events[0].passed = True
    third = ring.acquire()
    assert third.tensor.data_ptr() == first.tensor.data_ptr()
    assert ring.acquire().tensor.data_ptr() not in (first.tensor.data_ptr(), second.tensor.data_ptr())


def test_sends_only_the_used_part() -> None:
    destination = torch.full((8,), -1, dtype=torch.int32)
    ring = StagingRing(CpuDevice(), destination)
    staging = ring.acquire()
    staging.ints[:] = range(8)
    ring.send(staging, 3)
    assert destination.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
