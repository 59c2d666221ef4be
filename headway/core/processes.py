"""What can be known of another process."""

from __future__ import annotations

import sys
import time


def processor_seconds(pid: int) -> float | None:
    """Processor time a process has used so far; None where the system does not tell, or there is no such process."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the clock of a process, as clock_getcpuclockid(3) spells it
    except (OSError, OverflowError):
        return None
