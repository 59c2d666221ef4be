"""Host waits are counted, each under its reason."""

from __future__ import annotations

import time
from dataclasses import dataclass

from headway.device.base import Device


@dataclass(slots=True)
class WaitCounter:
    """How often, and for how many seconds in all, the host waited for the device for one reason."""

    waits: int = 0
    seconds: float = 0.0

    def add(self, start: float) -> None:
        """A wait that began at ``start`` (``time.perf_counter``) is over."""
        self.waits += 1
        self.seconds += time.perf_counter() - start

    def copied(self, device: Device, start: float) -> None:
        """A copy that began at ``start`` is queued: that was a wait where ``device`` is asynchronous and host memory is not
        pinned."""
        if device.asynchronous and not device.pins_memory:
            self.add(start)
