"""Where ranks leave word for each other while they start: names and bytes, in the leader's memory.

torch's process groups find each other through it (``rank_store``), so they listen on random ports that only ranks learn, which
have shown that they know the secret.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from headway.parallel.group import RankError
from headway.parallel.wire import Link

SET, GET, ADD, FOUND, MISSING = range(64, 69)
"""Kinds of frames."""
POLL_SECONDS: Final = 0.002


class Keys(Protocol):
    """What one rank sees of it."""

    def set(self, name: str, value: bytes) -> None:
        """Later values replace earlier ones."""

    def get(self, name: str) -> bytes | None:
        """None: nobody has set it yet."""

    def add(self, name: str, number: int) -> int:
        """The sum of all that was added so far."""


class OwnKeys:
    """The leader's own, which hold the values."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, name: str, value: bytes) -> None:
        with self._lock:
            self._values[name] = value

    def get(self, name: str) -> bytes | None:
        with self._lock:
            return self._values.get(name)

    def add(self, name: str, number: int) -> int:
        with self._lock:
            total = int(self._values.get(name, b"0")) + number
            self._values[name] = str(total).encode()
            return total

    def serve(self, link: Link, kind: int, data: bytes) -> None:
        """Do what a frame of another rank asks, at once."""
        (size,) = struct.unpack_from("<H", data)
        name, rest = data[2 : 2 + size].decode(), data[2 + size :]
        if kind == SET:
            self.set(name, rest)
            link.send(FOUND)
        elif kind == ADD:
            link.send(FOUND, str(self.add(name, int(rest))).encode())
        else:
            found = self.get(name)
            link.send(MISSING if found is None else FOUND, found or b"")


class FarKeys:
    """Another rank's: asks the leader over a link that carries nothing else back."""

    def __init__(self, link: Link, seconds: float) -> None:
        self._link, self._seconds = link, seconds
        self._lock = threading.Lock()

    def set(self, name: str, value: bytes) -> None:
        self._ask(SET, name, value)

    def get(self, name: str) -> bytes | None:
        return self._ask(GET, name, b"")

    def add(self, name: str, number: int) -> int:
        return int(self._ask(ADD, name, str(number).encode()) or b"0")

    def _ask(self, kind: int, name: str, value: bytes) -> bytes | None:
        encoded = name.encode()
        with self._lock:
            self._link.send(kind, struct.pack("<H", len(encoded)) + encoded + value)
            answer = self._link.receive(self._seconds)
        if answer is None:
            raise RankError(f"{self._link.name} has not answered for {self._seconds:g} s")
        return answer[1] if answer[0] == FOUND else None


class FileKeys:
    """Files in a folder that the ranks of one host share, of mode 0700."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, f"key-{name.encode().hex()}")

    def set(self, name: str, value: bytes) -> None:
        own = f"{self._path(name)}.{os.getpid()}.{threading.get_ident()}"
        with open(own, "wb") as file:
            file.write(value)
        os.replace(own, self._path(name))  # whoever reads it finds all of it

    def get(self, name: str) -> bytes | None:
        try:
            with open(self._path(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def add(self, name: str, number: int) -> int:
        with open(os.path.join(self._folder, "lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = int(self.get(name) or b"0") + number
            self.set(name, str(total).encode())
            return total


def wait_for(keys: Keys, name: str, seconds: float, check: Callable[[], None] = lambda: None) -> bytes:
    """What was set under ``name``, once it is.

    Args:
        check: called again and again; raises when there is no point in waiting any more.

    Raises:
        RankError: nobody set it in time.
    """
    deadline = time.monotonic() + seconds
    while (found := keys.get(name)) is None:
        check()
        if time.monotonic() > deadline:
            raise RankError(f"no other rank said {name!r} within {seconds:g} s")
        time.sleep(POLL_SECONDS)
    return found
