"""The data: one wait, waits grouped into findings, and the log that collects them."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Iterable
from typing import Any

from headway.syncs.fixes import fix_for

MAX_WAITS = 50_000
"""Waits kept one by one for the timeline; beyond it only the findings count on."""


class Kind(enum.StrEnum):
    """Why the host blocked."""

    READ = "read"
    """A device value became a host value: item(), tolist(), cpu(), bool()."""
    SIZE = "size"
    """The size of a result depends on device values: nonzero(), boolean masks, unique()."""
    UPLOAD = "upload"
    """A blocking copy from host to device: torch.tensor(list, device="cuda"), .to("cuda") from ordinary memory."""
    PAGEABLE = "pageable"
    """A copy called non_blocking whose host side is not pinned or not dense, so the driver stages it and may block."""
    EVENT = "event"
    """Event.synchronize()."""
    STREAM = "stream"
    """Stream.synchronize()."""
    DEVICE = "device"
    """torch.cuda.synchronize(), a wait for everything."""
    QUERY = "query"
    """A loop around Event.query() or Stream.query(): the host spins instead of sleeping."""
    MEMORY = "memory"
    """Freeing or registering memory made the driver wait for the device."""
    OTHER = "other"
    """A wait that fits no other kind, in an extension for example."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A line of the user's code. ``line`` is 0 where only the thread is known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclasses.dataclass(frozen=True)
class Wait:
    """One wait of the host.

    Attributes:
        site: the innermost frame of the user's code.
        kind: see Kind.
        call: what was called, as "Tensor.item" or "cudaStreamSynchronize".
        micros: duration in microseconds; None where no probe could time it.
        start_ns: of time.perf_counter_ns(), or of the trace; 0 where unknown.
        thread: name of the waiting thread.
        detector: the probe that saw it: torch, calls, cupti, profiler, simulation.
        reason: of the allowance it happened under, or None.
        stack: "file:line function", innermost first, user frames only.
    """

    site: Site
    kind: Kind
    call: str
    micros: float | None = None
    start_ns: int = 0
    thread: str = "MainThread"
    detector: str = "torch"
    reason: str | None = None
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        lost = "" if self.micros is None else f", {self.micros:.0f} us"
        return f"{self.site} in {self.site.function}: {self.call} ({self.kind}{lost})"


@dataclasses.dataclass
class Finding:
    """All waits of one site, kind, call and reason.

    Attributes:
        count: how many waits.
        micros: their sum in microseconds, of those that were timed.
        timed: how many were timed.
        threads: names of the waiting threads.
    """

    site: Site
    kind: Kind
    call: str
    reason: str | None
    detector: str
    stack: tuple[str, ...]
    count: int = 0
    micros: float = 0.0
    timed: int = 0
    threads: set[str] = dataclasses.field(default_factory=set)

    @property
    def sanctioned(self) -> bool:
        """Whether an allowance gave a reason."""
        return self.reason is not None

    def add(self, wait: Wait) -> None:
        """Count ``wait``."""
        self.count += 1
        self.threads.add(wait.thread)
        if wait.micros is not None:
            self.micros += wait.micros
            self.timed += 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fix = fix_for(self.kind, self.call)
        return {
            "file": self.site.file,
            "line": self.site.line,
            "function": self.site.function,
            "kind": str(self.kind),
            "call": self.call,
            "count": self.count,
            "micros": round(self.micros, 3) if self.timed else None,
            "threads": sorted(self.threads),
            "sanctioned": self.sanctioned,
            "reason": self.reason,
            "detector": self.detector,
            "stack": list(self.stack),
            "fix": {"name": fix.name, "advice": fix.advice},
        }


class Log:
    """What a region or a run collected. Threads may add at the same time.

    Attributes:
        probes: the probes that were attached, with what each watches: an empty log is only worth these.
        waits: the first MAX_WAITS waits, in order of arrival.
        unkept: how many more there were.
    """

    def __init__(self, probes: Iterable[str] = ()) -> None:
        self.probes = list(probes)
        self.waits: list[Wait] = []
        self.unkept = 0
        self._findings: dict[tuple[Site, Kind, str, str | None], Finding] = {}
        self._lock = threading.Lock()

    def add(self, wait: Wait) -> None:
        """Record ``wait``."""
        key = (wait.site, wait.kind, wait.call, wait.reason)
        with self._lock:
            finding = self._findings.get(key)
            if finding is None:
                finding = Finding(*key, wait.detector, wait.stack)
                self._findings[key] = finding
            finding.add(wait)
            if len(self.waits) < MAX_WAITS:
                self.waits.append(wait)
            else:
                self.unkept += 1

    @property
    def findings(self) -> list[Finding]:
        """All findings, the most expensive first, then the most frequent."""
        with self._lock:
            found = list(self._findings.values())
        return sorted(found, key=lambda f: (-f.micros, -f.count, f.site.file, f.site.line))

    @property
    def unsanctioned(self) -> list[Finding]:
        """The findings without a reason."""
        return [finding for finding in self.findings if not finding.sanctioned]

    @property
    def sanctioned(self) -> list[Finding]:
        """The findings with a reason."""
        return [finding for finding in self.findings if finding.sanctioned]

    @property
    def count(self) -> int:
        """Unsanctioned waits."""
        return sum(finding.count for finding in self.unsanctioned)

    def text(self) -> str:
        """A table for people."""
        from headway.syncs.report import table

        return table(self)
