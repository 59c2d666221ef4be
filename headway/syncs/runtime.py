"""Everything the live probe asks of CUDA, behind one interface; the tests' fake has the same methods."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from headway.syncs.errors import ProbeError
from headway.syncs.findings import Kind


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """A function the probe wraps.

    Attributes:
        owner: module or class.
        attribute: its name there.
        kind: what a call is: a wait, or for QUERY a poll.
        label: what the report calls it.
    """

    owner: Any
    attribute: str
    kind: Kind
    label: str


class Runtime(Protocol):
    """The device side."""

    def require(self) -> None:
        """Raise ProbeError where there is no device to watch."""
        ...

    def warn_mode(self, on: bool) -> None:
        """Make torch warn of the syncs it knows, process-wide, or put back what was set before."""
        ...

    def entry_points(self) -> tuple[EntryPoint, ...]:
        """What to wrap: waits torch says nothing of."""
        ...

    def capturing(self) -> bool:
        """Whether a graph is being recorded on this thread, so that nothing may wait."""
        ...

    def prove(self) -> None:
        """Wait once, so that the probe can check that it sees it."""
        ...

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the device owns ``tensor``."""
        ...

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether its host memory is page-locked."""
        ...


class CudaRuntime:
    """The real one."""

    def __init__(self) -> None:
        self._before = 0

    def require(self) -> None:
        if not torch.cuda.is_available():
            built = torch.version.cuda
            why = f"torch is built for CUDA {built} but sees no device" if built else "this torch is built without CUDA"
            raise ProbeError(f"nothing to watch: {why} (--simulate runs the program on pretended CUDA tensors)")

    def warn_mode(self, on: bool) -> None:
        if on:
            self._before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
            torch.cuda.set_sync_debug_mode(1 if on else self._before)

    def entry_points(self) -> tuple[EntryPoint, ...]:
        # torch.cuda.synchronize looks its C function up at each call: wrapping that one also covers names imported before.
        found = [
            EntryPoint(torch._C, "_cuda_synchronize", Kind.DEVICE, "torch.cuda.synchronize"),  # noqa: SLF001
            EntryPoint(torch._C, "_accelerator_synchronizeDevice", Kind.DEVICE, "torch.accelerator.synchronize"),  # noqa: SLF001
            EntryPoint(torch.cuda.Event, "synchronize", Kind.EVENT, "Event.synchronize"),
            EntryPoint(torch.cuda.Stream, "synchronize", Kind.STREAM, "Stream.synchronize"),
            EntryPoint(torch.cuda.Event, "query", Kind.QUERY, "Event.query"),
            EntryPoint(torch.cuda.Stream, "query", Kind.QUERY, "Stream.query"),
        ]
        return tuple(entry for entry in found if hasattr(entry.owner, entry.attribute))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def prove(self) -> None:
        torch.zeros(1, device="cuda").item()

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()


class Patches:
    """Wrapped entry points, and the way back."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def put(self, entry: EntryPoint, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``entry`` by ``wrap(original)``.

        Raises:
            ProbeError: the attribute cannot be replaced.
        """
        inherited = entry.attribute not in vars(entry.owner)
        original = getattr(entry.owner, entry.attribute)
        try:
            setattr(entry.owner, entry.attribute, wrap(original))
        except (AttributeError, TypeError) as error:
            raise ProbeError(f"{entry.label} cannot be wrapped: {error}") from error
        if inherited:
            self._undo.callback(delattr, entry.owner, entry.attribute)
        else:
            self._undo.callback(setattr, entry.owner, entry.attribute, original)

    def remove(self) -> None:
        """Put all originals back."""
        self._undo.close()
