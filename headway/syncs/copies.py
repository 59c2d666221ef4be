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
    host = target if memory.on_device(source) else source
    return None if memory.pinned(host) and not staged(source, target, memory.on_device(target)) else Kind.PAGEABLE


def staged(source: torch.Tensor, target: torch.Tensor, up: bool | None = None) -> bool:
    """Whether a copy that says non_blocking goes through a temporary on the host, which is never pinned.

    As torch decides it (copy_requires_temporaries and copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cu): elements of one
    dtype in the same dense order go directly; else the device converts and reorders, and the host's side must be contiguous.

    Args:
        up: whether the target is the device's; looked up if not given.
    """
    up = target.is_cuda if up is None else up
    if source.dtype == target.dtype and _same_order(source, target):
        return False
    return not (source.expand_as(target) if up else target).is_contiguous()


def _same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not dense(b):
        return False
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return b.numel() == 1 or all(x == y for size, x, y in steps if size != 1)


def _non_blocking(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The first boolean among the positional arguments, or the keyword."""
    given = kwargs.get("non_blocking")
    if given is None:
        given = next((value for value in args[1:] if isinstance(value, bool)), False)
    return bool(given) and name != "cpu"
