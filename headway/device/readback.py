"""The only way from device to host, and the only place where the engine waits for the device.

(Where host memory cannot be pinned the copies themselves block, here and in ``device.staging``; those waits are counted too.)

One packed copy per step goes to a host buffer on the copy stream, behind an event. The buffer and the device tensor it is
read from belong to the ticket until ``release``: neither can be reused while the copy may still run.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from headway.device.base import Device, Event
from headway.device.waits import WaitCounter
from headway.syncs import allowed

SANCTION = "back-pressure: the oldest of the steps in flight is not done"
"""Why the engine may wait: the device is the bottleneck, as it should be."""


class Ticket:
    """A readback under way."""

    def __init__(self, owner: Readback, source: torch.Tensor, buffer: torch.Tensor, done: Event) -> None:
        self._owner, self._source, self._buffer, self._done = owner, source, buffer, done

    def wait(self) -> npt.NDArray[np.int32]:
        """The copied integers, a view that is valid until ``release``. Blocks until they have arrived; the wait is counted."""
        if not self._done.query():
            start = time.perf_counter()
            with allowed(SANCTION):
                self._done.synchronize()
            self._owner.back_pressure.add(start)
        view: npt.NDArray[np.int32] = self._buffer.numpy()[: self._source.numel()]  # host: after the copy's event
        return view

    def has_arrived(self) -> bool:
        """Whether ``wait`` would not block."""
        return self._done.query()

    def release(self) -> None:
        """Give the buffer back; views from ``wait`` must not be used any more, nor may the ticket."""
        self._owner.recycle(self._buffer, self._done)


class Readback:
    """Starts readbacks of at most ``num_ints`` int32 each; grows by a buffer when all are on loan.

    Attributes:
        back_pressure: the loop found the oldest step unfinished and had to wait for it.
        unpinned: copies that blocked because the host's memory is not pinned.
    """

    def __init__(self, device: Device, num_ints: int) -> None:
        self._device, self._num_ints = device, num_ints
        self._free: list[tuple[torch.Tensor, Event]] = []
        self.back_pressure, self.unpinned = WaitCounter(), WaitCounter()

    def start(self, source: torch.Tensor, produced: Event | None = None) -> Ticket:
        """Copy ``source`` (contiguous int32 [<= num_ints]) once the work queued on ``main`` so far is done.

        ``produced``: the event to mark that work with, when the caller wants to keep it.
        """
        buffer, done = self._free.pop() if self._free else self._new_buffer()
        produced = produced or self._device.new_event()
        produced.record(self._device.main)
        self._device.copies.wait_event(produced)
        start = time.perf_counter()
        with self._device.copies.active():
            buffer[: source.numel()].copy_(source, non_blocking=True)
        self.unpinned.copied(self._device, start)
        done.record(self._device.copies)
        return Ticket(self, source, buffer, done)

    def recycle(self, buffer: torch.Tensor, done: Event) -> None:
        """Take back what a released ticket had."""
        self._free.append((buffer, done))

    def _new_buffer(self) -> tuple[torch.Tensor, Event]:
        return self._device.host_ints(self._num_ints), self._device.new_event()
