"""Readback buffers belong to their ticket until it is released; waits are counted."""

from __future__ import annotations

import torch

from headway.device.base import Event, Stream
from headway.device.cpu import CpuDevice
from headway.device.readback import Readback


def test_buffers_are_not_shared_between_open_tickets() -> None:
    readback = Readback(CpuDevice(), 4)
    first = readback.start(torch.tensor([1, 2], dtype=torch.int32))
    second = readback.start(torch.tensor([3, 4, 5], dtype=torch.int32))
    assert first.wait().tolist() == [1, 2]
    assert second.wait().tolist() == [3, 4, 5]
    view = first.wait()
    first.release()
    third = readback.start(torch.tensor([9], dtype=torch.int32))
    assert view[0] == 9, "a released buffer is the next one used"
    assert third.wait().tolist() == [9]
    assert second.wait().tolist() == [3, 4, 5]


def test_a_wait_that_blocks_is_counted_and_one_that_does_not_is_not() -> None:
    class Late:
        """Passes when somebody waits for it."""

        def __init__(self) -> None:
            self.passed = False

        def record(self, stream: Stream) -> None:
            self.passed = False

        def query(self) -> bool:
            return self.passed

        def synchronize(self) -> None:
            self.passed = True

        def elapsed_us(self, later: Event) -> float:
            return 0.0

    class LateDevice(CpuDevice):
        def new_event(self, timing: bool = False) -> Event:
            return Late()

    readback = Readback(LateDevice(), 2)
    ticket = readback.start(torch.zeros(1, dtype=torch.int32))
    ticket.wait()
    ticket.wait()
    assert readback.back_pressure.waits == 1
