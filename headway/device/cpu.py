"""A CPU as a device: everything queued is done at once, so events are always passed and nothing ever waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from headway.device.base import Event, Graph, Stream
from headway.device.cpu_threads import usable_threads


class CpuStream:
    """A stream whose work is done by the time it is queued."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def active(self) -> AbstractContextManager[object]:
        """Operations run as they come."""
        return nullcontext()


class CpuEvent:
    """An event that has always happened."""

    def record(self, stream: Stream) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always true."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""

    def elapsed_us(self, later: Event) -> float:
        """No device clock: zero."""
        return 0.0


def limit_threads() -> None:
    """Give torch, and with it our kernels, no more threads than this process can run; OMP_NUM_THREADS has the last word."""
    threads = usable_threads()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > threads:
        torch.set_num_threads(threads)


class CpuDevice:
    """The synchronous device of plain CPU serving. See ``device.base.Device``."""

    pins_memory = False
    asynchronous = False
    captures_graphs = False
    compiles_kernels = False

    def __init__(self) -> None:
        limit_threads()
        self.torch_device = torch.device("cpu")
        self.main: Stream = CpuStream()
        self.copies: Stream = CpuStream()
        self.clock: Stream | None = None
        self.notes = ["CPU device: steps run synchronously, run-ahead and CUDA graphs have nothing to hide"]
        if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive" and torch.get_num_threads() > 1:
            self.notes.append(
                "torch's OpenMP threads spin on the cores that ours need: import headway before torch, or set "
                "OMP_WAIT_POLICY=passive"
            )

    def new_event(self, timing: bool = False) -> Event:
        """An event that has always happened."""
        return CpuEvent()

    def new_stream(self) -> Stream:
        """One more of them."""
        return CpuStream()

    def joined(self) -> AbstractContextManager[object]:
        """Nothing is a thread's own."""
        return nullcontext()

    def host_ints(self, num_ints: int) -> torch.Tensor:
        """Plain memory."""
        return torch.zeros(num_ints, dtype=torch.int32)

    def capture(self, body: Callable[[], object], *, first: Graph | None = None, reused: bool = False) -> Graph:
        """A CPU records nothing."""
        raise NotImplementedError("the CPU device captures no graphs")

    def memory_bytes(self) -> tuple[int, int]:
        """(available, total) physical memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def peak_bytes(self) -> int:
        """Unknown."""
        return 0

    def reset_peak(self) -> None:
        """Nothing is measured."""

    def wait_idle(self) -> None:
        """Always idle."""

    def close(self) -> None:
        """Nothing to undo."""
