"""Ranks of ``peer_reduce_`` that share this machine's memory: each has a buffer with a region in it, and garbage around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headway.kernels.peer_reduce import CHUNK, FILL, peer_reduce_, peer_reduce_norm_, region_bytes

START = 96
"""Bytes before the region."""
GARBAGE = 21845
EPS = 1e-5


class PeerBuffers:
    """Of ranks that call with at most ``units`` units of ``elements``.

    Args:
        memories: int16, one for each rank and one more, as large as ``buffer_ints`` says.
        fresh: make them ready; else somebody has.
    """

    def __init__(
        self, memories: list[torch.Tensor], units: int, elements: int, itemsize: int, *, fresh: bool = True
    ) -> None:
        self.size, self.elements = len(memories) - 1, elements
        count = region_bytes(units, elements, itemsize, self.size) // 2
        self.regions = [each[START // 2 : START // 2 + count] for each in memories[:-1]]
        self.around = [(each[: START // 2], each[START // 2 + count :]) for each in memories[:-1]]
        self.stop = memories[-1]
        if fresh:
            for region, around in zip(self.regions, self.around, strict=True):
                region.fill_(FILL)
                for each in around:
                    each.fill_(GARBAGE)
            self.stop.zero_()
        self.addresses = torch.tensor([each.data_ptr() for each in memories])
        self.parity = [torch.zeros(units, dtype=torch.int32) for _ in range(self.size)]

    def reduce(self, kind: str, rank: int, two_shot: bool, *tensors: Any) -> None:
        """Call it as ``rank``, by its "reference" or its "kernel"; with more tensors than x, the one with the norm."""
        op = peer_reduce_ if len(tensors) == 1 else peer_reduce_norm_
        call: Callable[..., None] = op.reference if kind == "reference" else op.implementation("cuda")
        more = (EPS, 0.5) if len(tensors) > 1 else ()
        call(*tensors, self.parity[rank], self.addresses, rank, self.size, START, two_shot, *more)

    def complaints(self) -> list[str]:
        """What is wrong between two calls."""
        found = [f"buffer {n} is not empty" for n, each in enumerate(self.regions) if not bool((each == FILL).all())]
        for n, around in enumerate(self.around):
            if not all(bool((each == GARBAGE).all()) for each in around):
                found.append(f"something was written beside the region of rank {n}")
        return found


def buffer_ints(units: int, elements: int, itemsize: int, size: int) -> int:
    """int16 numbers of a buffer, garbage included."""
    return (START + region_bytes(units, elements, itemsize, size)) // 2 + 64


def own_buffers(size: int, units: int, dtype: torch.dtype, elements: int = CHUNK) -> PeerBuffers:
    """In this process's memory."""
    ints = buffer_ints(units, elements, dtype.itemsize, size)
    return PeerBuffers([torch.empty(ints, dtype=torch.int16) for _ in range(size + 1)], units, elements, dtype.itemsize)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random ones, among them what is never sent, and what is no number."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[:: 5 + seed % 3] = -0.0
    if dtype.itemsize == 4:
        x.view(torch.int32)[seed % 7 :: 11] = -2147450880
    x[seed % 2 * 17 :: 63] = 0.0
    return x


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the ranks."""
    found = torch.zeros(parts[0].shape)
    for each in parts:
        found += torch.where(each.abs() < 1e-40, 0.0, each.float())
    return found.to(parts[0].dtype)
