"""Unexpected host waits, counted while the engine serves: ``EngineArgs.count_host_waits``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from headway.core.errors import ConfigError
from headway.device.base import Device
from headway.syncs import Log, ProbeError, record
from headway.syncs.live import LiveProbe
from headway.syncs.runtime import CudaRuntime, Runtime


class HostWaits:
    """Watches the thread that turns the host loop. Back-pressure is sanctioned where it happens (``device.readback``).

    It costs about a microsecond a step: torch is told to warn of its own synchronisations, and the functions that wait
    are wrapped; nothing looks at calls that do not wait.

    Raises:
        ConfigError: there is no CUDA device whose waits could be seen.
    """

    def __init__(self, device: Device, runtime: Runtime | None = None) -> None:
        if not device.asynchronous:
            raise ConfigError(
                "count_host_waits: this device is synchronous, so there is nothing to wait for; leave it off"
            )
        self._probe = LiveProbe(runtime or CudaRuntime(), light=True)
        self._log = Log()
        self._open = True
        try:
            self._probe.arm()
        except ProbeError as error:
            raise ConfigError(f"count_host_waits: {error}; leave it off on this machine") from error

    def watching(self) -> AbstractContextManager[Log]:
        """Waits of this thread inside the context are counted."""
        self._probe.rearm()
        return record(self._log, probes=())

    def counts(self) -> dict[str, int]:
        """Unsanctioned waits so far by kind (``headway.syncs.Kind``)."""
        found: dict[str, int] = {}
        for finding in self._log.unsanctioned:
            found[str(finding.kind)] = found.get(str(finding.kind), 0) + finding.count
        return found

    def text(self) -> str:
        """The findings with their lines, for a log."""
        return self._log.text()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        if self._open:
            self._open = False
            self._probe.disarm()
