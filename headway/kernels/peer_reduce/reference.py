"""What ``peer_reduce_`` and ``peer_reduce_norm_`` mean, over addresses of host memory."""

from __future__ import annotations

import ctypes
import time
from typing import Final

import torch

from headway.core.ints import cdiv
from headway.kernels.rms_norm.reference import add_rms_norm

CHUNK: Final = 2048
"""Elements of a unit where rows do not matter."""
FILL: Final = -32768
"""A region's int16 numbers at first: EMPTY in all dtypes. -0.0 in those of 16 bits, -4.6e-41 in float32."""
EMPTY: Final = {2: FILL, 4: -2147450880}
"""Bytes of an element -> what stands where nothing has arrived."""
ALIGNED: Final = 64
"""Elements; units and parts begin at multiples, so that each thread moves 16 bytes at a time."""


def stride(elements: int) -> int:
    """Elements from unit to unit of a region."""
    return cdiv(elements, ALIGNED) * ALIGNED


def part(elements: int, size: int) -> int:
    """Elements of a unit that each rank sums up with ``two_shot``; the last ranks may have fewer, or none."""
    return stride(cdiv(elements, size))


def region_bytes(units: int, elements: int, itemsize: int, size: int) -> int:
    """Of a region for ``units`` units."""
    return 2 * (size + 1) * units * stride(elements) * itemsize


def peer_reduce_(
    x: torch.Tensor, parity: torch.Tensor, buffers: torch.Tensor, rank: int, size: int, start: int, two_shot: bool
) -> None:
    flat = x.view(-1)
    call = PeerCall(x, CHUNK, parity, buffers, rank, size, start)
    units = [flat[at : at + CHUNK] for at in range(0, len(flat), CHUNK)]
    for own, total in zip(units, call.sums(units, two_shot), strict=True):
        own.copy_(total)


def peer_reduce_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, parity: torch.Tensor,
    buffers: torch.Tensor, rank: int, size: int, start: int, two_shot: bool, eps: float, factor: float,
) -> None:  # fmt: skip
    call = PeerCall(x, x.shape[1], parity, buffers, rank, size, start)
    if len(x):
        total = torch.stack(call.sums(list(x), two_shot))
        out.copy_(add_rms_norm(total, residual, weight, eps, factor))


class PeerCall:
    """A call of this rank's: it sends all it has, then waits for what the others send. Arguments as of ``peer_reduce_``.

    Args:
        x: of the dtype that is sent.
        elements: of a unit.
    """

    def __init__(
        self,
        x: torch.Tensor,
        elements: int,
        parity: torch.Tensor,
        buffers: torch.Tensor,
        rank: int,
        size: int,
        start: int,
    ) -> None:
        self._parity, self._rank, self._size, self._dtype = parity, rank, size, x.dtype
        self._part, self._empty = part(elements, size), EMPTY[x.itemsize]
        self._whole = torch.int16 if x.itemsize == 2 else torch.int32
        shape = (2, size + 1, len(parity), stride(elements))
        self._buffers = [_memory(int(each) + start, shape, self._whole) for each in buffers[:size]]
        self._stop = _memory(int(buffers[size]), (1,), torch.int32)

    def sums(self, units: list[torch.Tensor], two_shot: bool) -> list[torch.Tensor]:
        """Of each unit, in its dtype."""
        for at, own in enumerate(units):
            for peer in range(self._size):
                if peer != self._rank:
                    self._send(own, at, peer, self._rank, self._columns(peer, own) if two_shot else slice(None))
        found = []
        for at, own in enumerate(units):
            columns = self._columns(self._rank, own) if two_shot else slice(None)
            total = torch.zeros(own[columns].shape)
            for source in range(self._size):
                if source == self._rank:
                    total += self._words(own[columns]).view(self._dtype).float()
                else:
                    total += self._taken(at, source, len(own), columns).float()
            found.append(total.to(self._dtype))
        if two_shot:
            for at, (own, total) in enumerate(zip(units, found, strict=True)):
                whole = torch.empty_like(own)
                whole[self._columns(self._rank, own)] = total
                for peer in range(self._size):
                    self._send(whole, at, peer, self._size, self._columns(self._rank, own))
            found = [self._taken(at, self._size, len(own), slice(None)) for at, own in enumerate(units)]
        self._parity[: len(units)] ^= 1
        return found

    def exchanged(self, units: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """For each unit what goes to each rank -> what came from each, of this rank what it has for itself."""
        for at, parts in enumerate(units):
            for peer, own in enumerate(parts):
                if peer != self._rank:
                    self._send(own, at, peer, self._rank, slice(None))
        found = []
        for at, parts in enumerate(units):
            mine = self._words(parts[self._rank]).view(self._dtype)
            found.append(
                [
                    mine if source == self._rank else self._taken(at, source, len(mine), slice(None))
                    for source in range(self._size)
                ]
            )
        self._parity[: len(units)] ^= 1
        return found

    def _columns(self, rank: int, own: torch.Tensor) -> slice:
        return slice(min(rank * self._part, len(own)), min((rank + 1) * self._part, len(own)))

    def _words(self, x: torch.Tensor) -> torch.Tensor:
        words = x.clone().view(self._whole)
        return words.masked_fill_(words == self._empty, 0)

    def _send(self, own: torch.Tensor, at: int, peer: int, lane: int, columns: slice) -> None:
        place = self._buffers[peer][int(self._parity[at]), lane, at, : len(own)]
        place[columns] = self._words(own[columns])

    def _taken(self, at: int, lane: int, count: int, columns: slice) -> torch.Tensor:
        place = self._buffers[self._rank][int(self._parity[at]), lane, at, :count][columns]
        while bool((place == self._empty).any()) and not int(self._stop[0]):
            time.sleep(1e-4)
        found = place.clone()
        place.fill_(self._empty)
        return found.view(self._dtype)


def _memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)
