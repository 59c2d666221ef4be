"""uvicorn as this server wants it: no timers while idle, no signal handlers, headers bounded in size and in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headway.server.errors import ApiError

HEADER_SECONDS: Final = 30.0
"""How long a connection may take to send a whole request head, however it drips in."""
MAX_HEADER_BYTES: Final = 64 * 1024
KEEP_ALIVE_SECONDS: Final = 15
WRITE_CHUNK: Final = "headway.write_chunk"
NO_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
)


class Connection(H11Protocol):
    """HTTP/1.1 by h11, which bounds what it holds of a head; uvicorn lets a client take forever to send one.

    Applications find ``write_chunk`` in ``scope["state"][WRITE_CHUNK]``.
    """

    _head: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, WRITE_CHUNK: self.write_chunk}

    def write_chunk(self, data: bytes) -> bool:
        """Write a piece of a chunked body at once: an eighth of an event's cost lies in the layers this leaves out.

        Args:
            data: not empty; the response has begun, is chunked, and more follows through ``send``.

        Returns:
            False if nothing was written: the client is slow or gone, and ``send`` knows what to do.
        """
        if self.flow.write_paused or self.cycle.disconnected or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; the clock for its head runs until all of the head is here."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn does it in plain text. Behind an answer that has begun nothing can be said."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = ApiError(400, "this is no valid HTTP/1.1 request", None, "http").json()
            self.transport.write(NO_HTTP % (len(body), body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _too_slow(self) -> None:
        self._head = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class QuietServer(uvicorn.Server):
    """Waits for ``stop`` instead of looking ten times a second whether it is time to leave."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leave = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever runs this server."""
        yield

    async def main_loop(self) -> None:
        await self._leave.wait()

    def stop(self) -> None:
        """Close the listening socket, let connections finish what they write, and return from ``serve``."""
        self.should_exit = True
        self._leave.set()


def server(app: Any, **options: Any) -> QuietServer:
    """A server for ``app``; ``options`` go to uvicorn's Config."""
    return QuietServer(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            loop="none",  # ours runs already
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=2,
            **options,
        )
    )
