"""What the driver makes this process's threads wait for, by CUPTI; for benches that watch a piece of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headway.syncs import Log
from headway.syncs.cupti_probe import CuptiProbe
from headway.syncs.regions import PROCESS, judge


@contextmanager
def heard_by_the_driver() -> Iterator[tuple[Log, CuptiProbe]]:
    """A log of the waits of all threads inside the context, and the probe, which counts the calls that it has seen."""
    log, probe = Log(), CuptiProbe()
    probe.attach(judge)
    PROCESS.watch(log.add)
    try:
        yield log, probe
    finally:
        PROCESS.unwatch(log.add)
        probe.detach()
