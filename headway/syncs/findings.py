"""The data: one wait, waits grouped into findings, and the log that collects them."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Iterable
from typing import Any

from headway.syncs.fixes import cure_of
from headway.syncs.places import Site, package_of, short, source_line

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
class Wait:
    """One wait of the host.

    Attributes:
        site: the innermost frame of the user's own code.
        kind: see Kind.
        call: what was called, as "Tensor.item" or "cudaStreamSynchronize".
        micros: duration in microseconds; None where no probe could time it.
        start_ns: of time.perf_counter_ns(), or of the trace; 0 where unknown.
        thread: name of the waiting thread.
        detector: the probe that saw it: torch, calls, cupti, profiler, simulation.
        reason: of the allowance it happened under, or None.
        stack: "file:line function", innermost first, without torch's and the standard library's frames.
        within: the part of torch that the user's line called, "optim.adam.step"; empty where it called the operation itself.
        step: how often ``syncs.step()`` had been called; None if never.
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
    step: int | None = None
    within: str = ""

    @property
    def via(self) -> str:
        """The library's line through which ``site`` waited, "file:line function"; empty where it waited by itself."""
        inner = self.stack[0] if self.stack else ""
        return "" if inner == f"{self.site} {self.site.function}" else inner

    def __str__(self) -> str:
        lost = "" if self.micros is None else f", {self.micros:.0f} us"
        return f"{self.site} in {self.site.function}: {self.call} ({self.kind}{lost})"


@dataclasses.dataclass
class Finding:
    """All waits of one site, through one library line, of one kind, call and reason.

    Attributes:
        via: see Wait.
        steps: steps in which it waited; empty unless the program calls ``syncs.step()``.
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
    via: str = ""
    within: str = ""
    count: int = 0
    micros: float = 0.0
    timed: int = 0
    threads: set[str] = dataclasses.field(default_factory=set)
    steps: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def sanctioned(self) -> bool:
        """Whether an allowance gave a reason."""
        return self.reason is not None

    def add(self, wait: Wait) -> None:
        """Count ``wait``."""
        self.count += 1
        self.threads.add(wait.thread)
        if wait.step is not None:
            self.steps[wait.step] = self.steps.get(wait.step, 0) + 1
        if wait.micros is not None:
            self.micros += wait.micros
            self.timed += 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON. ``file`` and ``stack`` are relative to the project, ``path`` is whole."""
        fix = cure_of(self)
        return {
            "file": short(self.site.file),
            "path": self.site.file,
            "line": self.site.line,
            "function": self.site.function,
            "source": source_line(self.site),
            "via": _short_frame(self.via),
            "package": package_of(self.via.rpartition(" ")[0].rpartition(":")[0]) if self.via else "",
            "kind": str(self.kind),
            "call": self.call,
            "within": self.within,
            "count": self.count,
            "micros": round(self.micros, 3) if self.timed else None,
            "threads": sorted(self.threads),
            "sanctioned": self.sanctioned,
            "reason": self.reason,
            "detector": self.detector,
            "stack": [_short_frame(frame) for frame in self.stack],
            "steps": {str(step): count for step, count in sorted(self.steps.items())},
            "fix": {"name": fix.name, "advice": fix.advice},
        }


def _short_frame(frame: str) -> str:
    place, _, function = frame.rpartition(" ")
    file, _, line = place.rpartition(":")
    return f"{short(file)}:{line} {function}".strip() if file else frame


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
        self._findings: dict[tuple[Site, Kind, str, str | None, str], Finding] = {}
        self._lock = threading.Lock()

    def add(self, wait: Wait) -> None:
        """Record ``wait``."""
        key = (wait.site, wait.kind, wait.call, wait.reason, wait.via)
        with self._lock:
            finding = self._findings.get(key)
            if finding is None:
                finding = Finding(*key[:4], wait.detector, wait.stack, wait.via, wait.within)
                self._findings[key] = finding
            finding.add(wait)
            if len(self.waits) < MAX_WAITS:
                self.waits.append(wait)
            else:
                self.unkept += 1

    def join(self, other: Finding) -> None:
        """Add what another process collected of one finding."""
        key = (other.site, other.kind, other.call, other.reason, other.via)
        with self._lock:
            mine = self._findings.setdefault(key, other)
            if mine is not other:
                mine.count += other.count
                mine.micros += other.micros
                mine.timed += other.timed
                mine.threads |= other.threads
                for step, count in other.steps.items():
                    mine.steps[step] = mine.steps.get(step, 0) + count

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

    @property
    def lines(self) -> int:
        """Lines with unsanctioned waits, however often each waited."""
        return len({(finding.site.file, finding.site.line) for finding in self.unsanctioned})

    def text(self) -> str:
        """A table for people."""
        from headway.syncs.report import table

        return table(self)
