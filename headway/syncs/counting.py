"""How often a thread calls into CUDA, and what for: copies, launches, waits. Counted by CUPTI at the driver boundary.

    with CallCounter() as counter:
        step()
        print(counter.take())       # of this thread, since the last take

Every CUDA call is followed, which costs some microseconds each: for measuring, not for production.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections import Counter
from typing import Any, Final, Self

from headway.syncs.cupti_api import Subscription, parameters
from headway.syncs.driver import ASYNC_COPIES, blocking, plain
from headway.syncs.errors import ProbeError

COPY_KINDS: Final = {0: "HtoH", 1: "HtoD", 2: "DtoH", 3: "DtoD", 4: "default"}
"""cudaMemcpyKind."""
_KIND_OFFSET: Final = 24
"""Of the kind among the parameters of cudaMemcpyAsync(dst, src, bytes, kind, stream)."""


@dataclasses.dataclass
class Calls:
    """What one thread asked of CUDA.

    Attributes:
        waits: blocking calls, by name.
        copies: asynchronous copies by direction ("HtoD", "DtoH", "DtoD", "default").
        graph_launches, kernel_launches: how many of each.
        others: every other call, by name.
    """

    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    copies: Counter[str] = dataclasses.field(default_factory=Counter)
    graph_launches: int = 0
    kernel_launches: int = 0
    others: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, name: str, direction: str | None) -> None:
        """Count one call, by its plain name."""
        if blocking(name) is not None:
            self.waits[name] += 1
        elif name in ASYNC_COPIES:
            self.copies[direction or "default"] += 1
        elif "GraphLaunch" in name:
            self.graph_launches += 1
        elif "LaunchKernel" in name or "LaunchCooperativeKernel" in name:
            self.kernel_launches += 1
        else:
            self.others[name] += 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {  # not dataclasses.asdict, which counts a Counter's items anew
            "waits": dict(self.waits),
            "copies": dict(self.copies),
            "graph_launches": self.graph_launches,
            "kernel_launches": self.kernel_launches,
            "others": dict(self.others),
        }


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.calls = Calls()


class CallCounter:
    """Counts the outermost CUDA calls of every thread, each for itself."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._subscription: Subscription | None = None

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            ProbeError: CUPTI cannot be had, or a deliberate wait was not counted.
        """
        import torch

        self._subscription = Subscription(self._callback, None)
        torch.cuda.synchronize()
        if not self.take().waits:
            self.__exit__()
            raise ProbeError("CUPTI accepted the subscription, but a deliberate wait was not counted")
        return self

    def __exit__(self, *error: object) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def take(self) -> Calls:
        """What this thread called since it last asked."""
        calls, self._thread.calls = self._thread.calls, Calls()
        return calls

    def _callback(self, userdata: Any, domain: int, callback_id: int, data: Any) -> None:
        thread, subscription = self._thread, self._subscription
        if subscription is None:
            return
        if subscription.entering(data):
            thread.depth += 1
            return
        thread.depth = max(thread.depth - 1, 0)
        if not thread.depth:  # a driver call inside a runtime call is the same call
            name = plain(data.function_name or "?")
            thread.calls.add(name, direction(name, parameters(data)) if name in ASYNC_COPIES else None)


def direction(name: str, address: int) -> str | None:
    """Where an asynchronous copy goes, by its name or its parameters; None where neither tells."""
    for known in ("HtoD", "DtoH", "DtoD"):
        if known in name:
            return known
    if name != "cudaMemcpyAsync" or not address:
        return None
    return COPY_KINDS.get(ctypes.c_int.from_address(address + _KIND_OFFSET).value)
