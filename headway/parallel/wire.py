"""Messages between ranks: frames over a stream socket, between ends that have shown each other that they know the secret.

A frame is a length (u32), a kind (u8) and its bytes; what the bytes mean is the receiver's business, and nobody unpickles them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from typing import Final

from headway.parallel.group import RankError

HEAD: Final = struct.Struct("<IB")
LARGEST: Final = 256 * 2**20
"""Bytes of a frame; a longer one is no frame of ours."""
NONCE_BYTES: Final = 32
HANDSHAKE_SECONDS: Final = 10.0
MOST_HELLO_BYTES: Final = 4096


class Link:
    """One connection. Any thread may send, one may receive.

    Args:
        connection: a connected stream socket, which belongs to the link from now on.
        name: of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket, self.name = connection, name
        self._sending = threading.Lock()
        self._received = bytearray()
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def send(self, kind: int, data: bytes = b"", seconds: float | None = None) -> None:
        """Send one frame.

        Raises:
            RankError: the other end has gone, or has taken nothing for so many seconds.
        """
        message = memoryview(HEAD.pack(len(data), kind) + data)
        with self._sending:
            while message:
                try:
                    message = message[self._socket.send(message) :]
                except BlockingIOError:
                    if not select.select([], [self._socket], [], seconds)[1]:
                        raise RankError(f"{self.name} has taken no message for {seconds:g} s") from None
                except OSError as error:
                    raise RankError(f"{self.name} has gone: {error.strerror or error}") from None

    def receive(self, seconds: float | None = None) -> tuple[int, bytes] | None:
        """The next frame's kind and bytes; None: none came within so many seconds.

        Raises:
            RankError: the other end has gone, or sends no frames.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            if len(self._received) >= HEAD.size:
                size, kind = HEAD.unpack_from(self._received)
                if size > LARGEST:
                    raise RankError(f"{self.name} sent a frame of {size} bytes, which is none of ours")
                end = HEAD.size + size
                if len(self._received) >= end:
                    data = bytes(self._received[HEAD.size : end])
                    del self._received[:end]
                    return kind, data
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                if not select.select([self._socket], [], [], left)[0]:
                    return None
                more = self._socket.recv(1 << 20)
            except (OSError, ValueError) as error:
                raise RankError(f"{self.name} has gone: {error}") from None
            if not more:
                raise RankError(f"{self.name} has closed its connection")
            self._received += more

    def close(self) -> None:
        """Both ends see it. A thread that receives is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# -- the handshake -----------------------------------------------------------------------------------------------------


def proof(secret: bytes, role: bytes, mine: bytes, theirs: bytes, hello: bytes) -> bytes:
    """What shows that an end knows the secret: it covers both nonces, who speaks, and what was said."""
    return hmac.new(secret, b"headway-ranks-1" + role + mine + theirs + hello, hashlib.sha256).digest()


def greet(connection: socket.socket, secret: bytes, hello: bytes) -> None:
    """The connecting end: show that it knows the secret, see that the other does, and say ``hello``.

    Raises:
        RankError: the other end does not know the secret, refuses what was said, or does not answer in time.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        theirs, shown = _exactly(connection, NONCE_BYTES), _exactly(connection, 32)
        if not hmac.compare_digest(shown, proof(secret, b"leader", theirs, nonce, b"")):
            raise RankError(
                "whoever listens at the leader's address does not know the secret; compare HEADWAY_RANK_SECRET"
            )
        connection.sendall(struct.pack("<H", len(hello)) + hello + proof(secret, b"follower", nonce, theirs, hello))
        size = struct.unpack("<H", _exactly(connection, 2))[0]
        if size:
            raise RankError(f"the leader refused this rank: {_exactly(connection, size).decode(errors='replace')}")
    except (OSError, EOFError) as error:
        raise RankError(f"no handshake with the leader: {str(error) or type(error).__name__}") from None
    connection.settimeout(None)


def welcome(connection: socket.socket, secret: bytes) -> bytes:
    """The listening end: what the other says. Nothing it says is looked at before it has shown that it knows the secret.

    ``answer`` must follow.

    Raises:
        RankError: it does not know the secret, or does not speak in time.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        theirs, nonce = _exactly(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce + proof(secret, b"leader", nonce, theirs, b""))
        size = struct.unpack("<H", _exactly(connection, 2))[0]
        if size > MOST_HELLO_BYTES:
            raise RankError("a stranger sent something else than a rank would")
        hello = _exactly(connection, size)
        if not hmac.compare_digest(_exactly(connection, 32), proof(secret, b"follower", theirs, nonce, hello)):
            raise RankError("a stranger does not know the secret; compare HEADWAY_RANK_SECRET on all hosts")
    except (OSError, EOFError) as error:
        raise RankError(f"a stranger broke off the handshake: {str(error) or type(error).__name__}") from None
    return hello


def answer(connection: socket.socket, refusal: str = "") -> None:
    """Take the other end in, or say why not."""
    said = refusal.encode()[:MOST_HELLO_BYTES]
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("<H", len(said)) + said)
    connection.settimeout(None)


def _exactly(connection: socket.socket, size: int) -> bytes:
    deadline, found = time.monotonic() + HANDSHAKE_SECONDS, b""
    while len(found) < size:
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        more = connection.recv(size - len(found))
        if not more:
            raise EOFError("the other end closed the connection")
        found += more
    return found
