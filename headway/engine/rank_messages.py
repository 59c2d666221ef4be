"""What ranks say to each other beside steps: who they are, what to build, that they live, why they end."""

from __future__ import annotations

import os
import platform
import socket
import time
from typing import Final

import msgspec
import torch

from headway import __version__
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.seat import Seat
from headway.parallel.group import RankError

BOOT, BEAT, FAILED = 1, 2, 3
"""Kinds of frames on a control connection: ``Boot``, nothing, text."""
CONTROL, STEPS = "control", "steps"
"""What a connection is for."""
SECRET_VARIABLE: Final = "HEADWAY_RANK_SECRET"
MIN_SECRET_CHARS: Final = 16
CONNECT_SECONDS: Final = 600.0


class Boot(msgspec.Struct, array_like=True):
    """What a follower is to be.

    Attributes:
        log_level: show the log on stderr from this level on; None: show none.
        seat: of its replica, where several share experts.
    """

    args: EngineArgs
    rank: int
    log_level: int | None = None
    log_format: str = "text"
    seat: Seat | None = None


class Hello(msgspec.Struct, array_like=True):
    """What a rank of another host says when it has shown that it knows the secret."""

    rank: int
    use: str
    version: str


encode = msgspec.msgpack.encode
_boots: msgspec.msgpack.Decoder[Boot] = msgspec.msgpack.Decoder(Boot)
_hellos: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


def decode_boot(data: bytes) -> Boot:
    """Raises msgspec.DecodeError on anything else."""
    return _boots.decode(data)


def decode_hello(data: bytes) -> Hello:
    """Raises RankError on anything else."""
    try:
        return _hellos.decode(data)
    except msgspec.DecodeError as error:
        raise RankError(f"a rank sent a first message that is not Headway's: {error}") from None


def version() -> str:
    """What must be equal on all ranks: they run the same steps, and draw the same tokens."""
    return f"headway {__version__}, torch {torch.__version__}, {platform.machine()}"


def hello(rank: int, use: str) -> bytes:
    """Of this process."""
    return encode(Hello(rank, use, version()))


def secret() -> bytes:
    """What ranks of several hosts show each other that they know.

    Raises:
        ConfigError: there is none, or it is short.
    """
    found = os.environ.get(SECRET_VARIABLE, "")
    if len(found) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"ranks of several hosts need a shared secret of at least {MIN_SECRET_CHARS} characters in {SECRET_VARIABLE}, the "
            "same on all hosts, for example from `openssl rand -hex 32`"
        )
    return found.encode()


def connected(address: str, port: int) -> socket.socket:
    """A connection to the leader, which may begin to listen later than we begin to ask."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=10.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(f"no leader at {address} port {port}: {error}") from None
            time.sleep(0.5)
