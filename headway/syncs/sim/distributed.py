"""torch.distributed under the simulation: NCCL's groups are gloo's, whose collectives run on the values that the CPU holds.

What NCCL makes the host wait for: barriers (``ProcessGroupNCCL`` blocks the CPU's thread until the barrier is over, as
torch's documentation of ``barrier`` says), and collectives of Python objects, whose sizes are read from the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from headway.syncs.findings import Kind

Report = Callable[[Kind, str], None]
OBJECTS: Final = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)


class Groups:
    """Whether the program's process groups are NCCL's, as it asked."""

    def __init__(self) -> None:
        self.pretended = False

    def real(self, backend: Any) -> str:
        """The backend that serves what was asked for; None is a card's default, which is NCCL."""
        if backend is None or "nccl" in str(backend).lower():
            self.pretended = True
            return "gloo"
        return str(backend)


def places(report: Report) -> list[tuple[Any, dict[str, Any]]]:
    """Modules, and the names to replace in them; none where this torch has no torch.distributed."""
    if not dist.is_available():
        return []
    from torch.distributed import device_mesh, distributed_c10d

    groups = Groups()
    starts = {
        "init_process_group": _started(distributed_c10d.init_process_group, groups),
        "new_group": _grouped(distributed_c10d.new_group, groups),
    }
    asks = {
        "is_nccl_available": lambda: True,
        "get_backend": _named(distributed_c10d.get_backend, groups),
        "barrier": _barrier(distributed_c10d.barrier, groups, report),
    }
    asks |= {name: _objects(getattr(distributed_c10d, name), groups, report) for name in OBJECTS}
    return [(dist, starts | asks), (distributed_c10d, starts), (device_mesh, starts), (torch.cuda.nccl, _NCCL)]


_NCCL: Final = {"version": lambda: (2, 28, 9), "is_available": lambda tensors: True}


def _started(real: Callable[..., Any], groups: Groups) -> Callable[..., Any]:
    @functools.wraps(real)
    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> Any:
        options.pop("device_id", None)  # the device to connect at once
        options.pop("pg_options", None)
        return real(groups.real(backend), *args, **options)

    return init_process_group


def _grouped(real: Callable[..., Any], groups: Groups) -> Callable[..., Any]:
    @functools.wraps(real)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        options.pop("pg_options", None)
        return real(ranks, timeout, None if backend is None else groups.real(backend), *args[1:], **options)

    return new_group


def _named(real: Callable[..., Any], groups: Groups) -> Callable[..., Any]:
    @functools.wraps(real)
    def get_backend(group: Any = None) -> Any:
        found = real(group)
        return dist.Backend("nccl") if groups.pretended and found == "gloo" else found

    return get_backend


def _barrier(real: Callable[..., Any], groups: Groups, report: Report) -> Callable[..., Any]:
    @functools.wraps(real)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **options: Any) -> Any:  # noqa: ARG001
        if groups.pretended and not async_op:
            report(Kind.STREAM, "torch.distributed.barrier")
        return real(group, async_op, None, **options)

    return barrier


def _objects(real: Callable[..., Any], groups: Groups, report: Report) -> Callable[..., Any]:
    @functools.wraps(real)
    def collective(*args: Any, **options: Any) -> Any:
        if groups.pretended:
            report(Kind.READ, f"torch.distributed.{real.__name__}")
        return real(*args, **{key: value for key, value in options.items() if key != "device"})

    return collective
