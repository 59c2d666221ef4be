"""A ring of messages in memory that two processes share: one writes, one reads, neither takes a lock.

The writer owns ``head``, the reader ``tail`` (bytes written and read so far, u64 each). A message is its length (u32), its kind
(u8, with padding to 4 bytes) and its bytes, padded to 8; where it would not fit before the end of the memory, it begins anew
at the start. The reader spins for a moment, then sleeps on the doorbell and says so: only then does the writer ring.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from typing import Final

from headway.parallel.group import RankError

HEADER: Final = 64
"""head at 0, tail at 16, asleep at 32."""
MESSAGE: Final = struct.Struct("<II")
WORD: Final = struct.Struct("<Q")
SKIP: Final = 0xFFFFFFFF
"""The length of what is no message: the rest of the memory is not used."""
SPIN_SECONDS: Final = 200e-6
NAP_SECONDS: Final = 0.05
"""The reader looks again after that, whether the bell rang or not."""


def ring_memory(capacity: int) -> int:
    """A file descriptor of memory for a ring of ``capacity`` bytes. It has no name: who does not inherit it cannot open it."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("headway-ring")
    else:
        number, path = tempfile.mkstemp(prefix="headway-ring-")
        os.unlink(path)
    os.ftruncate(number, HEADER + capacity)
    return number


class Ring:
    """One end of a ring.

    Args:
        memory: file descriptor from ``ring_memory``; stays the caller's.
        bell: one end of a socket pair; belongs to the ring from now on.

    Attributes:
        waits: how often the writer found no room and had to wait.
    """

    def __init__(self, memory: int, bell: socket.socket, name: str) -> None:
        self._map = mmap.mmap(memory, 0)
        self._capacity = (len(self._map) - HEADER) & ~7
        self._bell, self._name = bell, name
        bell.setblocking(False)
        self._mine = 0
        self.waits = 0

    # -- the writer ------------------------------------------------------------------------------------------------

    def send(self, kind: int, data: bytes, seconds: float = 60.0) -> None:
        """Write a message; long ones in pieces no longer than a quarter of the ring.

        Raises:
            RankError: the reader has made no room for so many seconds.
        """
        piece = self._capacity // 4
        pieces = [data[start : start + piece] for start in range(0, len(data), piece)] or [b""]
        for number, each in enumerate(pieces, 1):
            self._write(kind | (len(pieces) > number) << 8, each, seconds)

    def _write(self, kind: int, data: bytes, seconds: float) -> None:
        need = MESSAGE.size + (len(data) + 7 & ~7)
        at = self._mine % self._capacity
        skipped = self._capacity - at if at + need > self._capacity else 0
        self._room(need + skipped, seconds)
        if skipped:
            MESSAGE.pack_into(self._map, HEADER + at, SKIP, 0)
            at = 0
        start = HEADER + at
        self._map[start + MESSAGE.size : start + MESSAGE.size + len(data)] = data
        MESSAGE.pack_into(self._map, start, len(data), kind)
        self._mine += need + skipped
        WORD.pack_into(self._map, 0, self._mine)  # last: the message is whole
        if self._map[32]:
            self._ring()

    def _room(self, need: int, seconds: float) -> None:
        if self._mine + need - WORD.unpack_from(self._map, 16)[0] <= self._capacity:
            return
        self.waits += 1
        deadline = time.monotonic() + seconds
        while self._mine + need - WORD.unpack_from(self._map, 16)[0] > self._capacity:
            self._ring()
            if time.monotonic() > deadline:
                raise RankError(f"{self._name} has read no message for {seconds:g} s")
            time.sleep(1e-3)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # a full bell rings anyway; whose reader has gone is told by others
            self._bell.send(b"!")

    # -- the reader ------------------------------------------------------------------------------------------------

    def receive(self, seconds: float) -> tuple[int, bytes] | None:
        """The next message's kind and bytes; None: none came within so many seconds."""
        found = self._read(seconds)
        if found is None or not found[0] >> 8:
            return found
        kind, pieces = found[0] & 0xFF, [found[1]]
        while found[0] >> 8:
            found = self._read(seconds=60.0)
            if found is None:
                raise RankError(f"{self._name} broke off within a message")
            pieces.append(found[1])
        return kind, b"".join(pieces)

    def _read(self, seconds: float) -> tuple[int, bytes] | None:
        if not self._await(seconds):
            return None
        at = self._mine % self._capacity
        size, kind = MESSAGE.unpack_from(self._map, HEADER + at)
        if size == SKIP:
            self._mine += self._capacity - at
            at = 0
            size, kind = MESSAGE.unpack_from(self._map, HEADER)
        start = HEADER + at + MESSAGE.size
        data = self._map[start : start + size]
        self._mine += MESSAGE.size + (size + 7 & ~7)
        WORD.pack_into(self._map, 16, self._mine)
        return kind, data

    def _await(self, seconds: float) -> bool:
        """Whether a message has come."""
        now = time.monotonic()
        deadline, spin = now + seconds, now + min(SPIN_SECONDS, seconds)
        while not self._has_message():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now < spin:
                continue
            self._map[32] = 1
            if not self._has_message():  # it may have come before the writer could see that we sleep
                ready, _, _ = select.select([self._bell], [], [], min(NAP_SECONDS, deadline - now))
                if ready:
                    with contextlib.suppress(BlockingIOError):
                        if not self._bell.recv(4096):
                            raise RankError(f"{self._name} has gone")
            self._map[32] = 0
        return True

    def _has_message(self) -> bool:
        head: int = WORD.unpack_from(self._map, 0)[0]
        return head != self._mine

    def close(self) -> None:
        """This end is not used any more."""
        self._bell.close()
        self._map.close()
