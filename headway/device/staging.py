"""The only way from host to device inside a step: a ring of host buffers, each guarded by a fence.

A buffer is handed out again only when the copy that reads it has executed. When every buffer is still in use the ring
grows by one instead of waiting: the host never blocks here, and the number of buffers settles at what the run-ahead needs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headway.device.base import Device, Event
from headway.device.waits import WaitCounter


@dataclass(slots=True)
class Staging:
    """One host buffer on loan: fill ``ints``, then ``StagingRing.send``.

    Attributes:
        tensor, ints: the same int32 [num_ints] memory as a torch tensor and as a numpy array.
        fence: passed when the copy that reads the buffer has executed.
    """

    tensor: torch.Tensor
    ints: npt.NDArray[np.int32]
    fence: Event


class StagingRing:
    """Host buffers of ``num_ints`` int32 for uploads to ``destination``.

    Args:
        destination: int32 [num_ints] on the device; one is enough, since uploads are ordered with the kernels on ``main``.

    Attributes:
        unpinned: copies that blocked because the host's memory is not pinned.
    """

    def __init__(self, device: Device, destination: torch.Tensor) -> None:
        self._device = device
        self._destination = destination
        self._free_when_fenced: list[Staging] = []
        self.unpinned = WaitCounter()

    def acquire(self) -> Staging:
        """A buffer that no pending copy reads."""
        if self._free_when_fenced and self._free_when_fenced[0].fence.query():
            return self._free_when_fenced.pop(0)
        tensor = self._device.host_ints(self._destination.numel())
        return Staging(tensor, tensor.numpy(), self._device.new_event())  # host: a view of host memory

    def send(self, staging: Staging, num_ints: int) -> None:
        """Copy the first ``num_ints`` to the device on ``main`` and fence the buffer."""
        start = time.perf_counter()
        self._destination[:num_ints].copy_(staging.tensor[:num_ints], non_blocking=True)
        self.unpinned.copied(self._device, start)
        staging.fence.record(self._device.main)
        self._free_when_fenced.append(staging)
