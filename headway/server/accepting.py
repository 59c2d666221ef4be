"""Taking connections: no more than there are open files for, and quietly when there are none left.

asyncio's own loop tries again for every place of the backlog when a file cannot be opened, and logs each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Final

from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.server.logs import Seldom

AT_ONCE: Final = 64
"""Connections taken between two looks of the event loop at what else there is."""
PAUSE_SECONDS: Final = 1.0
"""How long nothing is accepted after the system had no file for a connection."""
LOOK_SECONDS: Final = 0.1
"""How often it is seen, while all places are taken, whether one is free."""
TO_REFUSE: Final = 64
"""Connections beyond the limit that are open to be told so; more wait in the system's queue."""
OTHER_FILES: Final = 96
"""Open files of everything but connections: standard streams, engine, event loop, processes for clients' work, model files."""
HANDSHAKE_SECONDS: Final = 10.0
TRANSIENT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
ALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""A client whose machine is gone is found out within two minutes."""


def room_for_connections(wanted: int) -> int:
    """Raise this process's limit on open files, and say how many connections fit it; at most ``wanted``.

    Raises:
        ConfigError: not even one does.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    spare = limit - OTHER_FILES
    room = min(wanted, spare - min(TO_REFUSE, spare // 4))
    if room < 1:
        raise ConfigError(
            f"this process may open {limit} files, and the server alone needs {OTHER_FILES}: raise ulimit -n"
        )
    if room < wanted:
        logger.warning(
            "--max-connections is %d here, not %d: this process may open %d files (ulimit -n)", room, wanted, limit
        )
    return room


class Acceptor:
    """Accepts connections of one listening socket for a protocol. Has the verbs uvicorn asks of asyncio's servers.

    Args:
        listener: listens already; not closed here.
        make: makes the protocol of a connection.
        num_open: connections that are open now.
        most: so many may be; ``TO_REFUSE`` more are taken, for ``make``'s protocols to refuse.
        secure: for https.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        num_open: Callable[[], int],
        most: int,
        secure: ssl.SSLContext | None = None,
    ) -> None:
        self._listener, self._make, self._num_open, self._secure = listener, make, num_open, secure
        self._most = most + min(TO_REFUSE, max(1, most // 3))
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()
        self._seldom = Seldom()
        self._later: asyncio.TimerHandle | None = None
        self._closed = False
        self._listen()

    def _listen(self) -> None:
        self._later = None
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._later = self._loop.call_later(seconds, self._listen)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._num_open() + len(self._starting) >= self._most:
                self._pause(LOOK_SECONDS)
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
                self._seldom.warn(f"cannot accept connections ({error.strerror}): trying again every second")
                self._pause(PAUSE_SECONDS)
                return
            task = self._loop.create_task(self._begin(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            _keep_alive(connection)
            limit = HANDSHAKE_SECONDS if self._secure is not None else None
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._secure, ssl_handshake_timeout=limit
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError is an OSError
            connection.close()

    def close(self) -> None:
        """Accept no more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener.fileno())
            if self._later is not None:
                self._later.cancel()
            for task in self._starting:
                task.cancel()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""


def _keep_alive(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
