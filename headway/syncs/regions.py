"""record(), forbid(), allowed(): regions of one thread, judged innermost first.

A context variable holds the stack of the current thread (and task); new threads start with none. A wait walks the stack
outward: the first allowance it meets gives the reason for every region outside that allowance, so a ``forbid()`` inside
an ``allowed()`` is strict again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from headway.syncs.calls import CALLS
from headway.syncs.errors import ProbeError, SyncError
from headway.syncs.findings import Log, Wait
from headway.syncs.fixes import cure_of
from headway.syncs.probes import Probe
from headway.syncs.steps import STEPS

F = TypeVar("F", bound=Callable[..., Any])


class Region:
    """Base of the three: a context manager that is also a decorator, entered as often as one likes."""

    def _open(self) -> Entry:
        raise NotImplementedError

    def _close(self, entry: Entry) -> None:
        """Undo what _open did."""

    def _push(self) -> None:
        entry = self._open()
        _STACK.set((*_STACK.get(), entry))

    def _pop(self, failed: bool) -> None:
        *rest, entry = _STACK.get()
        _STACK.set(tuple(rest))
        self._close(entry)
        if failed:
            CALLS.pending = None
        CALLS.raise_pending()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pop(kind is not None)

    def __call__(self, function: F) -> F:
        """Decorate a plain function; each call is a region of its own."""
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError("syncs decorates plain functions; use `with` inside a coroutine or generator")

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._push()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self._pop(True)
                raise
            self._pop(False)
            return result

        return run  # type: ignore[return-value]


class Entry:
    """One open region on one thread's stack.

    Attributes:
        log: collects waits; None for an allowance.
        reason: of an allowance; None for the others.
        strict: whether an unsanctioned wait raises.
    """

    def __init__(self, log: Log | None, reason: str | None, strict: bool) -> None:
        self.log = log
        self.reason = reason
        self.strict = strict


class _Watched(Region):
    """A region that needs probes while it is open."""

    def __init__(self, strict: bool, probes: tuple[Probe, ...] | None, required: bool = True) -> None:
        self._strict = strict
        self._required = required
        self._probes = probes
        self.log = Log()

    def _open(self) -> Entry:
        from headway.syncs.live import default_probes

        probes = default_probes() if self._probes is None else self._probes
        attached: list[Probe] = []
        try:
            for probe in probes:
                probe.attach(judge)
                attached.append(probe)
        except BaseException as error:
            for probe in reversed(attached):
                probe.detach()
            if self._required or not isinstance(error, ProbeError):
                raise
            return _WatchedEntry(self.log, False, ())
        self.log.probes = [f"{probe.name}: {probe.watches}" for probe in probes]
        return _WatchedEntry(self.log, self._strict, tuple(attached))

    def _close(self, entry: Entry) -> None:
        assert isinstance(entry, _WatchedEntry)
        for probe in reversed(entry.probes):
            probe.detach()


class _WatchedEntry(Entry):
    def __init__(self, log: Log, strict: bool, probes: tuple[Probe, ...]) -> None:
        super().__init__(log, None, strict)
        self.probes = probes


class record(_Watched):  # noqa: N801 - used as `with record() as log`
    """Collect this thread's waits: ``with record() as log``, or ``@record(log)`` around a function.

    Args:
        log: where to collect; a new one by default, given by ``as``.
        probes: what watches; by default torch's own mode plus wrapped calls. ProbeError if one cannot attach.
    """

    def __init__(self, log: Log | None = None, *, probes: tuple[Probe, ...] | None = None) -> None:
        super().__init__(False, probes)
        self.log = log or self.log

    def __enter__(self) -> Log:
        self._push()
        return self.log


class forbid(_Watched):  # noqa: N801
    """Raise SyncError at this thread's first wait that no ``allowed`` inside it covers. Gives the log, with the others.

    Args:
        required: whether a machine where no probe can attach is an error. If not, nothing is watched there, and the log's
            ``probes`` are empty.
    """

    def __init__(self, *, probes: tuple[Probe, ...] | None = None, required: bool = True) -> None:
        super().__init__(True, probes, required)

    def __enter__(self) -> Log:
        self._push()
        return self.log


class allowed(Region):  # noqa: N801
    """Waits inside are counted as sanctioned, with ``reason``, by the regions around it. Free where none is open.

    Raises:
        ValueError: the reason is empty.
    """

    def __init__(self, reason: str) -> None:
        if not reason.strip():
            raise ValueError("allowed() wants a reason: who needs this wait, and why is it worth it?")
        self.reason = reason

    def _open(self) -> Entry:
        return Entry(None, self.reason, False)

    def __enter__(self) -> Self:
        self._push()
        return self


_STACK: Final[ContextVar[tuple[Entry, ...]]] = ContextVar("headway.syncs", default=())


class Process:
    """What holds on every thread: the logs of whole-program runs, outermost of all. One per process, as torch's mode is."""

    def __init__(self) -> None:
        self._entries: tuple[Callable[[Wait], None], ...] = ()
        self._lock = threading.Lock()

    def watch(self, listener: Callable[[Wait], None]) -> None:
        """Give every thread's waits to ``listener``."""
        with self._lock:
            self._entries = (*self._entries, listener)

    def unwatch(self, listener: Callable[[Wait], None]) -> None:
        """Undo watch()."""
        with self._lock:
            self._entries = tuple(entry for entry in self._entries if entry != listener)

    @property
    def listeners(self) -> tuple[Callable[[Wait], None], ...]:
        """Those that want every thread's waits."""
        return self._entries


PROCESS: Final = Process()


def wanted() -> bool:
    """Whether anybody would hear of a wait on this thread: the cheap question before the expensive ones."""
    return bool(PROCESS.listeners) or any(entry.log is not None for entry in _STACK.get())


def judge(wait: Wait) -> None:
    """Give ``wait`` to the regions open on this thread, then to the process's.

    Raises:
        SyncError: a forbid() is open and no allowance inside it covers the wait.
    """
    reason: str | None = None
    offended = False
    if STEPS.number is not None:
        wait = dataclasses.replace(wait, step=STEPS.number)
    for entry in reversed(_STACK.get()):
        if entry.log is None:
            reason = reason or entry.reason
            continue
        entry.log.add(dataclasses.replace(wait, reason=reason))
        offended = offended or (entry.strict and reason is None)
    for listener in PROCESS.listeners:
        listener(dataclasses.replace(wait, reason=reason))
    if offended:
        advice = cure_of(wait)
        raise SyncError(f"the host waited for the device at {wait}. Cure: {advice.name}. {advice.advice}", wait)
