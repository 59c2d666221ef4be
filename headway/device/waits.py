"""Host waits are counted, each under its reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from headway.device.base import Device


@dataclass(slots=True)
class WaitCounter:
    """How often, and for how many seconds in all, the host waited for the device for one reason."""

    waits: int = 0
    seconds: float = 0.0

    def copying(self, device: Device) -> AbstractContextManager[None]:
        """Around a copy: it counts as a wait where ``device`` is asynchronous and host memory is not pinned."""
        return nullcontext() if device.pins_memory or not device.asynchronous else self._timed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waits += 1
        self.seconds += time.perf_counter() - start
