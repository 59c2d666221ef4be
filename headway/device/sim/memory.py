"""Memory of the simulated device and of its pinned host buffers: who used it, and poison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from headway.device.sim.clocks import AccessLog
from headway.device.sim.errors import Place

if TYPE_CHECKING:
    from headway.device.sim.timeline import Timeline

POISON_INTS = (0x5A5A5A5A, -0x5A5A5A5B, 1)
"""Far above, far below, and plausible: an index clamp must not be what saves us."""


class Memory:
    """One allocation. All views of it share it.

    Attributes:
        flat: the real CPU memory, one-dimensional.
        stream: name of the stream that was current when it was allocated; memory is reused in that stream's order.
        place: where it was allocated.
        log: its accesses.
        freed: where its last tensor was dropped, once that point was reached on ``stream``.
        graph: the graph whose private memory it is, if any.
        is_host: page-locked host memory.
    """

    __slots__ = ("flat", "freed", "graph", "is_host", "log", "place", "stream")

    def __init__(self, flat: torch.Tensor, stream: str, place: Place, *, is_host: bool = False) -> None:
        self.flat, self.stream, self.place, self.is_host = flat, stream, place, is_host
        self.log = AccessLog()
        self.freed: Place | None = None
        self.graph: object | None = None

    def poison(self, poison_int: int) -> None:
        """Overwrite everything."""
        fill_with_poison(self.flat, poison_int)


class Handle:
    """Owned by every tensor over a ``Memory``; when the last one goes, the memory is free for others."""

    __slots__ = ("_timeline", "memory")

    def __init__(self, memory: Memory, timeline: Timeline) -> None:
        self.memory, self._timeline = memory, timeline

    def __del__(self) -> None:
        self._timeline.free(self.memory)


class Access(NamedTuple):
    """Bytes [low, high) of a memory that a task reads or writes."""

    memory: Memory
    low: int
    high: int
    is_write: bool


def access(memory: Memory, view: torch.Tensor, is_write: bool) -> Access:
    """The bytes that ``view``, a view of ``memory.flat``, spans."""
    low = int(view.storage_offset()) * view.itemsize
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    high = low + (last + 1) * view.itemsize if view.numel() else low
    return Access(memory, low, high, is_write)


def fill_with_poison(tensor: torch.Tensor, poison_int: int) -> None:
    """NaN in floats, ``poison_int`` (cut to the type) in integers, True in bools."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        bits = 8 * tensor.itemsize
        value = poison_int & ((1 << min(bits, 32)) - 1)
        if tensor.dtype != torch.uint8 and value >> (min(bits, 32) - 1):
            value -= 1 << min(bits, 32)
        tensor.fill_(value)


@dataclass(slots=True)
class PendingRead:
    """An upload under way: what the host buffer held when the copy was queued, and must hold when it executes."""

    stream: str
    seq: int
    view: torch.Tensor
    snapshot: torch.Tensor
    place: Place

    def changed(self) -> bool:
        """Whether the host wrote to the buffer since."""
        return not torch.equal(self.view, self.snapshot)


@dataclass(slots=True)
class HostBuffer:
    """Page-locked memory and the uploads that read it."""

    memory: Memory
    reads: list[PendingRead] = field(default_factory=list)
