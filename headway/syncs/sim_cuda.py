"""torch.cuda for the simulation: enough of streams, events and queries for programs to run; the rest says so."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from headway.syncs.errors import ProbeError
from headway.syncs.findings import Kind
from headway.syncs.live import SPINS

PENDING_QUERIES: Final = 10
"""An event is found unfinished this often, so that loops around query() show themselves and still end."""

Report = Callable[[Kind, str], None]
MISSING: Final = ("CUDAGraph", "graph", "make_graphed_callables", "CUDAPluggableAllocator", "MemPool", "Generator")
"""Names of torch.cuda that have no meaning here."""


class SimEvent:
    """An event that has passed after PENDING_QUERIES queries or one wait."""

    report: Report

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self._left = 0
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._left, self._at = PENDING_QUERIES, time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Streams wait, hosts do not."""

    def query(self) -> bool:
        self._left = max(self._left - 1, 0)
        if self._left == PENDING_QUERIES - SPINS:
            type(self).report(Kind.QUERY, "Event.query")
        return self._left == 0

    def synchronize(self) -> None:
        self._left = 0
        type(self).report(Kind.EVENT, "Event.synchronize")

    def elapsed_time(self, end: SimEvent) -> float:
        """Milliseconds of host time between the two records."""
        return (end._at - self._at) * 1e3


class SimStream:
    """A stream on which everything has already happened."""

    report: Report
    event: type[SimEvent]
    device = torch.device("cuda", 0)
    device_index = 0
    cuda_stream = 0

    def __init__(self, device: object = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self._before: list[SimStream] = []

    def synchronize(self) -> None:
        type(self).report(Kind.STREAM, "Stream.synchronize")

    def query(self) -> bool:
        return True

    def wait_event(self, event: object) -> None:
        """Streams wait, hosts do not."""

    def wait_stream(self, stream: object) -> None:
        """Streams wait, hosts do not."""

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        event = event or type(self).event()
        event.record(self)
        return event


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[SimStream] = []


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ProbeError(f"the simulation does not serve torch.cuda.{name}: run on a GPU, without --simulate")

    return refuse


def _functions(report: Report) -> dict[str, Any]:
    event = type("Event", (SimEvent,), {"report": staticmethod(report)})
    stream_class = type("Stream", (SimStream,), {"report": staticmethod(report), "event": event})
    current, main = _Current(), stream_class()

    @contextlib.contextmanager
    def stream(chosen: SimStream | None) -> Iterator[None]:
        current.stack.append(chosen or main)
        try:
            yield
        finally:
            current.stack.pop()

    def number(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value  # a new function each time: Dynamo wants every name's to be its own

    settings: tuple[str, ...] = (
        "set_device",
        "init",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
    )
    settings += ("set_sync_debug_mode",)
    return {
        **{name: number(None) for name in settings},
        **{name: _missing(name) for name in MISSING},
        "Event": event,
        "Stream": stream_class,
        "stream": stream,
        "current_stream": lambda device=None: current.stack[-1] if current.stack else main,
        "default_stream": lambda device=None: main,
        "synchronize": lambda device=None: report(Kind.DEVICE, "torch.cuda.synchronize"),
        "is_available": number(True),
        "is_initialized": number(True),
        "is_bf16_supported": number(True),
        "is_current_stream_capturing": number(False),
        "device_count": number(1),
        "current_device": number(0),
        "get_sync_debug_mode": number(0),
        "get_device_name": number("simulated CUDA device"),
        "get_device_capability": number((9, 0)),
        "memory_allocated": number(0),
        "max_memory_allocated": number(0),
        "memory_reserved": number(0),
        "mem_get_info": number((2**34, 2**34)),
    }


@contextlib.contextmanager
def fake_cuda(report: Report) -> Iterator[None]:
    """Replace names of torch.cuda, process-wide, and put them back."""
    with contextlib.ExitStack() as undo:
        for name, value in _functions(report).items():
            if hasattr(torch.cuda, name):
                undo.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
                setattr(torch.cuda, name, value)
        undo.callback(setattr, torch, "compile", torch.compile)
        torch.compile = _uncompiled
        yield


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """torch.compile without compiling."""
    return (lambda function: function) if model is None else model
