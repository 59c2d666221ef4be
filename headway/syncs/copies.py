"""Copies that say non_blocking and may block all the same, and creations that copy: told from their arguments and result."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from headway.syncs.findings import Kind


class Memory(Protocol):
    """What the judgement needs to know of a tensor."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the device owns it."""
        ...

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether its host memory is page-locked."""
        ...


def dense(tensor: torch.Tensor) -> bool:
    """Whether elements fill one stretch of memory in some order of the dimensions, as one DMA transfer needs."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def suspicion(label: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, memory: Memory) -> Kind | None:
    """The kind of wait that the call implies whatever torch says of it; None where it implies none.

    Sees blocking and pageable copies between host and device, and tensors built on the device from host data.
    """
    name = label.rpartition(".")[2]
    if not isinstance(result, torch.Tensor) or result.numel() == 0:
        return None
    if name in ("tensor", "as_tensor", "asarray", "new_tensor"):
        source = args[1] if name == "new_tensor" and len(args) > 1 else args[0] if args else kwargs.get("data")
        from_device = isinstance(source, torch.Tensor) and memory.on_device(source)
        return Kind.UPLOAD if memory.on_device(result) and not from_device else None
    if name == "copy_" and len(args) > 1:
        source, target = args[1], args[0]
    elif name in ("to", "cuda", "cpu") and args:
        source, target = args[0], result
    else:
        return None
    if not isinstance(source, torch.Tensor) or memory.on_device(source) == memory.on_device(target):
        return None
    if not _non_blocking(name, args, kwargs):
        return Kind.READ if memory.on_device(source) else Kind.UPLOAD
    host, device = (target, source) if memory.on_device(source) else (source, target)
    # ``to`` casts on the device what it uploads; ``copy_`` on the host, into memory that is not pinned.
    cast = host.dtype != device.dtype and not (name == "to" and host is source)
    direct = not cast and host.shape == device.shape and dense(host)
    if direct and name == "copy_":
        direct = dense(device) and host.stride() == device.stride()
    return None if direct and memory.pinned(host) else Kind.PAGEABLE


def _non_blocking(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The first boolean among the positional arguments, or the keyword."""
    given = kwargs.get("non_blocking")
    if given is None:
        given = next((value for value in args[1:] if isinstance(value, bool)), False)
    return bool(given) and name != "cpu"
