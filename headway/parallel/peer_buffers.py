"""``PeerBuffers``: a piece of every GPU's memory that the GPUs of all ranks of a group read and write.

By the driver's handles for other processes, which are 64 bytes that ranks leave for each other like any other word. NVLink's
multicast is not touched, as it is when torch's symmetric memory meets without a variable of the environment against it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import torch

from headway.kernels.peer_reduce import FILL

Gather = Callable[[bytes], list[bytes]]
"""What this rank says -> what all ranks say, by rank; at the start only."""
ACCESS: Final = 2
"""CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED."""
LAZY_PEERS: Final = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
WHOLE: Final = 2 * 2**20
"""The driver shares memory by pieces of this size: a buffer that filled none would take other allocations along."""
HOST: Final = Path("/proc/sys/kernel/random/boot_id")


class NoPeerBuffersError(Exception):
    """Why ranks cannot reach each other's memory."""


class Offer(msgspec.Struct, array_like=True):
    """What a rank says of its buffer.

    Attributes:
        host, card: which they are; the same words mean the same on all ranks.
        handle: of the buffer.
        refusal: why there is none.
    """

    host: str = ""
    card: str = ""
    handle: bytes = b""
    refusal: str = ""


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Driver:
    """The few functions of the CUDA driver that buffers need. On the device that is current."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, size: int) -> int:
        """The address of ``size`` bytes, all int16 of them FILL."""
        address = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._do("cuMemsetD16_v2", address, ctypes.c_ushort(FILL & 0xFFFF), ctypes.c_size_t(size // 2))
        self._do("cuCtxSynchronize")
        return address.value

    def free(self, address: int) -> None:
        self._do("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        """What other processes open the allocation with."""
        found = _Handle()
        self._do("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(address))
        return bytes(found.bytes)

    def open(self, handle: bytes) -> int:
        """The address, here, of another process's allocation."""
        address = ctypes.c_uint64()
        theirs = _Handle((ctypes.c_ubyte * 64).from_buffer_copy(handle))
        self._do("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(LAZY_PEERS))
        return address.value

    def close(self, address: int) -> None:
        self._do("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def reaches(self, own: int, other: int) -> bool:
        """Whether the GPU of number ``own`` reads and writes the other's memory."""
        found = ctypes.c_int()
        self._do(
            "cuDeviceGetP2PAttribute", ctypes.byref(found), ctypes.c_int(ACCESS), ctypes.c_int(own), ctypes.c_int(other)
        )
        return bool(found.value)

    def _do(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name} gives CUDA error {status}")


class PeerBuffers:
    """Buffers of ``size`` bytes on every rank's GPU.

    Attributes:
        addresses: of all ranks' buffers, as this rank's GPU knows them.
    """

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver, self._opened = driver, list[int]()
        self._own = driver.allocate(-(-size // WHOLE) * WHOLE)
        self.addresses = list[int]()

    def handle(self) -> bytes:
        """Of this rank's."""
        return self._driver.handle(self._own)

    def open(self, offers: Sequence[Offer], rank: int, cards: Sequence[str]) -> None:
        """Open the others'; arguments as of ``meet``.

        Raises:
            OSError: one cannot be reached.
        """
        own = offers[rank]
        for peer, offer in enumerate(offers):
            if peer == rank:
                self.addresses.append(self._own)
                continue
            if offer.host != own.host:
                raise OSError(f"rank {peer} is on another host")
            if offer.card not in cards or offer.card == own.card:
                raise OSError(f"the GPU of rank {peer} is none that this process sees beside its own")
            if not self._driver.reaches(cards.index(own.card), cards.index(offer.card)):
                raise OSError(f"the GPU of rank {peer} is not connected")
            self._opened.append(self._driver.open(offer.handle))
            self.addresses.append(self._opened[-1])

    def close(self) -> None:
        """Nobody uses them any more."""
        for address in self._opened:
            with suppress(OSError):  # the process it belongs to may have gone
                self._driver.close(address)
        with suppress(OSError):
            self._driver.free(self._own)


def meet(
    driver: Callable[[], Driver], cards: Sequence[str], own: int, rank: int, size: int, gather: Gather
) -> PeerBuffers:
    """Make a buffer on this rank's GPU, the current one, and open the others'. All ranks call it; all have buffers, or none.

    Args:
        driver: makes it.
        cards: the GPUs that this process sees.
        own: which of them is this rank's.
        size: bytes of a buffer.

    Raises:
        NoPeerBuffersError: it does not work here.
    """
    buffers: PeerBuffers | None = None
    try:
        buffers = PeerBuffers(driver(), size)
        offer = Offer(HOST.read_text(encoding="utf-8").strip(), cards[own], buffers.handle())
    except (OSError, AttributeError) as error:  # no driver, or one that knows no such function
        offer = Offer(refusal=str(error))
    offers = [msgspec.msgpack.decode(each, type=Offer) for each in gather(msgspec.msgpack.encode(offer))]
    failures = [f"rank {n}: {each.refusal}" for n, each in enumerate(offers) if each.refusal]
    if buffers is not None and not failures:
        try:
            buffers.open(offers, rank, cards)
            said = gather(b"")
        except OSError as error:
            said = gather(str(error).encode())
        failures = [f"rank {n}: {each.decode()}" for n, each in enumerate(said) if each]
        if not failures:
            return buffers
    if buffers is not None:
        buffers.close()
    raise NoPeerBuffersError(failures[0])


def cards_here() -> list[str]:
    """The GPUs that this process sees, in order."""
    return [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
