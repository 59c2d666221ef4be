"""A runtime without CUDA: tensors are on the device because they are registered, and syncs warn as torch's do."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from headway.syncs.errors import ProbeError
from headway.syncs.findings import Kind
from headway.syncs.live import MESSAGE, LiveProbe
from headway.syncs.runtime import EntryPoint


class Event:
    """Finished after ``left`` queries."""

    left = 0

    def synchronize(self) -> None:
        self.left = 0

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


class FakeRuntime:
    """float64 tensors are the device's; int16 host tensors are pinned."""

    def __init__(self, present: bool = True, deaf: bool = False) -> None:
        self.present = present
        self.deaf = deaf
        self.mode = [False]
        self.event_class = type("Event", (Event,), {"synchronize": Event.synchronize, "query": Event.query})

    def require(self) -> None:
        if not self.present:
            raise ProbeError("no device")

    def warn_mode(self, on: bool) -> None:
        self.mode.append(on)

    def entry_points(self) -> tuple[EntryPoint, ...]:
        return (
            EntryPoint(self.event_class, "synchronize", Kind.EVENT, "Event.synchronize"),
            EntryPoint(self.event_class, "query", Kind.QUERY, "Event.query"),
        )

    def capturing(self) -> bool:
        return False

    def prove(self) -> None:
        if not self.deaf:
            self.sync()

    def sync(self) -> None:
        """A sync of torch's: a warning wherever it happens, if the process-wide mode is on."""
        if self.mode[-1]:
            warnings.warn(MESSAGE, UserWarning, stacklevel=2)

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.float64

    def pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.int16


class Reader(torch.Tensor):
    """A device tensor: item() syncs, as torch's would."""

    runtime: FakeRuntime

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("item", "tolist", "nonzero"):
            args[0].runtime.sync()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def device_tensor(runtime: FakeRuntime, *values: float) -> Reader:
    """A tensor whose reads sync."""
    made = torch.tensor(values, dtype=torch.float64).as_subclass(Reader)
    made.runtime = runtime
    return made


def probe(**options: Any) -> tuple[FakeRuntime, LiveProbe]:
    """A live probe on a fake runtime."""
    runtime = FakeRuntime(**options)
    return runtime, LiveProbe(runtime)


def in_thread(work: Any) -> BaseException | None:
    """Run ``work`` on another thread; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return raised[0] if raised else None
