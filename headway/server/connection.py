"""uvicorn as this server wants it: no timers while idle, no signal handlers, requests bounded in size and in time."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headway.server.accepting import Acceptor
from headway.server.errors import ApiError
from headway.server.logs import Seldom
from headway.server.plain import WHOLE_BODY, PlainCycle, PlainRequest, read_plain

HEADER_SECONDS: Final = 30.0
"""How long a connection may take to send a whole request head, however it drips in."""
REFUSED_SECONDS: Final = 5.0
"""The same for a connection that will be refused."""
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_HEADER_LINES: Final = 256
"""Lines are what reading a head costs: 64 KiB of empty headers would take as long as a hundred requests."""
WRITE_SECONDS: Final = 60.0
"""How long a client may leave its answers unread once the buffers are full."""
FREE_CHUNKS: Final = 4096
CHUNK_BYTES: Final = 64
"""Pieces of a chunked body hold so many bytes on average, beyond the first ``FREE_CHUNKS``: each costs as much as 16 KiB."""
KEEP_ALIVE_SECONDS: Final = 15
HELD_BYTES: Final = 16 * 1024
"""A plain request with so long a body, or a shorter one, is begun when all of it is here,"""
HOLD_SECONDS: Final = 0.05
"""or after this time, whatever has come; most clients send head and body apart, but at once."""
WRITE_CHUNK: Final = "headway.write_chunk"
WHEN_GONE: Final = "headway.when_gone"
CROWDED: Final = "headway.crowded"
"""Whether the connection is one too many, in ``scope["state"]``."""
TOO_LONG_HEAD: Final = (431, f"a request's head may have {MAX_HEADER_BYTES} bytes and {MAX_HEADER_LINES} lines")
VERSIONS: Final = frozenset(b"1.%d" % minor for minor in range(10))
"""What may be answered as HTTP/1.1 (RFC 9110, 2.5); h11 takes any two digits for it, those of HTTP/2 included."""
HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
NO_HTTP: Final = (
    b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
)


class BoundedH11(h11.Connection):
    """Refuses what would take long to read: heads that are long or have very many lines, bodies in very many tiny chunks.

    Attributes:
        refusal: status and reason, where it is not just that the bytes are no HTTP.
    """

    refusal: tuple[int, str] | None = None

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._chunks = self._body_bytes = 0

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError."""
        if self.their_state is h11.IDLE:
            self._check_head()
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == TOO_LONG_HEAD[0]:
                self.refusal = TOO_LONG_HEAD
            raise
        if isinstance(event, h11.Data):
            self._chunks += 1
            self._body_bytes += len(event.data)
            if self._chunks > FREE_CHUNKS and (self._chunks - FREE_CHUNKS) * CHUNK_BYTES > self._body_bytes:
                self.refusal = 400, "the body comes in too many small chunks"
                raise h11.RemoteProtocolError(self.refusal[1])
        elif isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
            if event.http_version not in VERSIONS:
                self.refusal = 505, "this server speaks HTTP/1.1 and HTTP/1.0"
                raise h11.RemoteProtocolError(self.refusal[1])
        return event

    def _check_head(self) -> None:
        """h11 bounds a head that is not complete; this bounds one that came at once, before it is taken apart."""
        received = self.trailing_data[0]
        end = HEAD_END.search(received)
        head = received if end is None else received[: end.start()]
        if len(head) > MAX_HEADER_BYTES or head.count(b"\n") > MAX_HEADER_LINES:
            self.refusal = TOO_LONG_HEAD
            raise h11.RemoteProtocolError(TOO_LONG_HEAD[1], error_status_hint=TOO_LONG_HEAD[0])


class Connection(H11Protocol):
    """HTTP/1.1 by h11, which bounds what it holds of a head; uvicorn lets a client take forever to send one.

    Applications find ``write_chunk`` in ``scope["state"][WRITE_CHUNK]``, ``when_gone`` in ``scope["state"][WHEN_GONE]``.

    Args:
        most: connections that may be open; one more is marked, for the application to refuse it.
        seldom: is told of what is no HTTP.
    """

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _gone: Callable[[], None] | None = None
    _hold: asyncio.TimerHandle | None = None
    _held = _later = b""

    def __init__(self, *args: Any, most: int, seldom: Seldom, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: BoundedH11 = BoundedH11()
        self._most, self._seldom = most, seldom
        self._head_seconds = HEADER_SECONDS
        hooks = {WRITE_CHUNK: self.write_chunk, WHEN_GONE: self.when_gone}
        self.app_state = {**self.app_state, **hooks, CROWDED: False}

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

    def when_gone(self, call: Callable[[], None] | None) -> bool:
        """Have ``call`` called when the client leaves while its request is answered; None: no longer.

        Returns:
            False where it has left already; nothing is called then.
        """
        self._gone = call
        return not self.cycle.disconnected

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's: a client has connected; the clock for its first head starts."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self.app_state[CROWDED] = True
            self._head_seconds = REFUSED_SECONDS
        self._head = self.loop.call_later(self._head_seconds, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; the clock for its head runs until all of the head is here."""
        if isinstance(self.cycle, PlainCycle) and not self.cycle.response_complete:
            self._later += data  # of the next request, before this one is answered
            self.flow.pause_reading()
            return
        if self._held:
            data, self._held = self._held + data, b""
        request = read_plain(data) if self._is_fresh() else None
        if request is None or (request.missing and len(request.body) + request.missing > HELD_BYTES):
            self._to_h11(data)
        elif request.missing:
            self._unset_keepalive_if_required()
            self._held = data
            if self._hold is None:  # one for the whole body: who drips it in gains no time
                self._hold = self.loop.call_later(HOLD_SECONDS, self._release)
        else:
            self._unset_keepalive_if_required()
            self._cancel_hold()
            self._begin(request)
            self._cancel()

    def _to_h11(self, data: bytes) -> None:
        self._cancel_hold()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self._head_seconds, self._too_slow)

    def _release(self) -> None:
        """The rest of a body takes its time: the application may have something to say before it is here."""
        data, self._held, self._hold = self._held, b"", None
        if not self.transport.is_closing():
            self._to_h11(data)

    def _cancel_hold(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None

    def _is_fresh(self) -> bool:
        """Nothing of a request has come, and none is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        idle = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE
        return idle and not self.conn.trailing_data[0]

    def _begin(self, request: PlainRequest) -> None:
        """Hand a whole request to the application, as uvicorn does with those that h11 has read."""
        raw_path, _, query = request.target.partition(b"?")
        self.headers = request.headers
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]
            "method": "POST",
            "root_path": self.root_path,
            "path": self.root_path + unquote(raw_path.decode("ascii")),
            "raw_path": self.root_path.encode("ascii") + raw_path,
            "query_string": query,
            "headers": request.headers,
            "state": self.app_state.copy(),
            WHOLE_BODY: request.body,
        }
        self.cycle = PlainCycle(
            scope=self.scope,
            conn=self.conn,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            on_response=self.on_response_complete,
        )
        task = self.loop.create_task(self.cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_response_complete(self) -> None:
        """A request is answered: the next may have come already."""
        super().on_response_complete()
        data, self._later = self._later, b""
        if data and not self.transport.is_closing():
            self.data_received(data)

    def pause_writing(self) -> None:
        """The client does not read what it is sent: give it a while."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read enough for more."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn does it in plain text. Behind an answer that has begun nothing can be said."""
        self._seldom.warn("a request is no valid HTTP")
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            status, why = self.conn.refusal or (400, "this is no valid HTTP/1.1 request")
            body = ApiError(status, why, None, "http").json()
            phrase = HTTPStatus(status).phrase.encode()
            self.transport.write(NO_HTTP % (status, phrase, len(body), body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the connection is closed; no clock of it runs on."""
        self._cancel()
        self._cancel_hold()
        self._held = self._later = b""
        super().connection_lost(exc)
        if self._gone is not None:
            self._gone()
        if self._unread is not None:
            self._unread.cancel()

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

    def __init__(self, config: uvicorn.Config, most: int) -> None:
        super().__init__(config)
        self._leave = asyncio.Event()
        self._most = most

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``, which are given always."""
        config, state, seldom = self.config, self.server_state, Seldom()
        lifespan_state: dict[str, Any] = {}

        def make() -> Connection:
            return Connection(config, state, lifespan_state, most=self._most, seldom=seldom)

        self.servers = [
            Acceptor(each, make, lambda: len(state.connections), self._most, config.ssl)  # type: ignore[misc]
            for each in sockets or []
        ]
        self.started = True

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


def server(app: Any, most: int, **options: Any) -> QuietServer:
    """A server for ``app`` with at most ``most`` connections; ``options`` go to uvicorn's Config."""
    return QuietServer(
        uvicorn.Config(
            app,
            http=Connection,  # made by our own startup
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
        ),
        most,
    )
