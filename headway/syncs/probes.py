"""The interface between what watches and what judges, and the reference count every probe needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from headway.syncs.findings import Wait

Sink = Callable[[Wait], None]
"""Takes a wait on the thread that waited; may raise SyncError, which the probe lets through to the user's line."""


class Probe(Protocol):
    """Something that sees waits. The CUDA layer is behind this; tests put a fake in its place.

    Attributes:
        name: short: torch, cupti, profiler, simulation.
        watches: what it sees, for the report.
    """

    @property
    def name(self) -> str: ...

    @property
    def watches(self) -> str: ...

    def attach(self, sink: Sink) -> None:
        """Watch this thread from now on; nests. Raises ProbeError rather than staying blind."""
        ...

    def detach(self) -> None:
        """Undo one attach() of this thread."""
        ...


class Counted:
    """A probe's process-wide part: set up by the first user, taken down by the last, on whatever threads they are."""

    def __init__(self, up: Callable[[], None], down: Callable[[], None]) -> None:
        self._up = up
        self._down = down
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._up()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._down()

    @property
    def users(self) -> int:
        """How many hold it."""
        return self._users
