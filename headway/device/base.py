"""All that the engine may ask of an accelerator.

Work is queued on two streams: ``main`` runs every kernel and every upload, ``copies`` runs readbacks. The host thread that
launches steps never blocks on either; the only sanctioned wait is ``Readback``'s (``device.readback``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class DeviceError(RuntimeError):
    """The engine broke a rule of the device, or the device is lost. No request is to blame, so no request may be failed for
    it: whoever catches errors of a step lets this one pass, and the engine stops."""


class Stream(Protocol):
    """A queue of device work, executed in order."""

    def wait_event(self, event: Event) -> None:
        """Later work on this stream starts after ``event``; the host does not wait."""

    def active(self) -> AbstractContextManager[object]:
        """Torch operations inside the context are queued on this stream. Not to be nested in itself."""


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Mark the work queued on ``stream`` so far."""

    def query(self) -> bool:
        """Whether that work is done. Never blocks. True before the first ``record``."""

    def synchronize(self) -> None:
        """Block the calling thread until that work is done."""

    def elapsed_us(self, later: Event) -> float:
        """Device microseconds from this event to ``later``, negative when that one passed first. Both must be done, as far as
        the host knows, and made with ``timing``. Never blocks."""


class Graph(Protocol):
    """A recorded sequence of device work."""

    def replay(self) -> None:
        """Queue the whole sequence on ``main`` in one launch."""


class Device(Protocol):
    """One accelerator (or a CPU that plays one).

    Attributes:
        torch_device: where tensors live.
        main, copies: the two streams.
        clock: a third one on which nothing is queued but timing events, each of which therefore passes as it is recorded;
            None where the device keeps no time. Only ``device.step_clock`` uses it.
        pins_memory: host buffers are page-locked, so copies need not block.
        asynchronous: work is done later than it is queued; otherwise run-ahead gains nothing.
        captures_graphs: CUDA graphs can be used.
        compiles_kernels: its kernels are compiled by Triton when they are first launched.
        notes: what this device does without, and why, for the start-up log.
    """

    torch_device: torch.device
    main: Stream
    copies: Stream
    clock: Stream | None
    pins_memory: bool
    asynchronous: bool
    captures_graphs: bool
    compiles_kernels: bool
    notes: list[str]

    def new_event(self, timing: bool = False) -> Event:
        """A fresh event; ``timing`` allows ``elapsed_us``."""

    def new_stream(self) -> Stream:
        """A further stream, beside the ones above."""

    def joined(self) -> AbstractContextManager[object]:
        """In it, another thread of the host queues work on ``main`` as the one that launches steps does, which waits."""

    def host_ints(self, num_ints: int) -> torch.Tensor:
        """An int32 [num_ints] host buffer that copies from and to the device can use without blocking."""

    def capture(self, body: Callable[[], object], *, first: Graph | None = None, reused: bool = False) -> Graph:
        """Record the work that ``body`` queues, without running it. Only where ``captures_graphs``.

        Args:
            first: the graph begins with the work of this one, which is not recorded again.
            reused: other graphs will begin with this one.
        """

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes where weights and KV live."""

    def peak_bytes(self) -> int:
        """Most bytes this process had allocated there since the last ``reset_peak``; 0 where unknown."""

    def reset_peak(self) -> None:
        """Start a new peak measurement."""

    def wait_idle(self) -> None:
        """Block until all queued work is done. For start-up and shutdown only, never inside a step."""

    def close(self) -> None:
        """Undo what choosing the device did to this thread; nothing runs on it any more. Twice is once."""
