"""A small HTTP/1.1 client for streams of server-sent events, made for measuring.

One request at a time per connection, connections kept and reused. Proxies, redirects and compression are not spoken: they
would stand between a server and its figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from headway.cli.http_wire import (
    MAX_HEAD_BYTES,
    Address,
    EventSplitter,
    OnBody,
    ResponseParser,
    StatusError,
    TransportError,
    error_text,
)
from headway.core.errors import HeadwayError

MAX_BODY_BYTES: Final = 64 * 2**20


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time. Made by ``HttpClient``.

    Attributes:
        open: it can be used.
        heard: something of the answer to the latest request has come.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[ResponseParser] | None = None
        self.open = False
        self.heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        """asyncio's: something was read; its time is taken here."""
        parser, now = self._parser, perf_counter()
        self.heard = True
        if parser is None:  # nobody asked
            self.close()
            return
        try:
            parser.feed(data, now)
        except Exception as error:
            self._finish(error)
            return
        if parser.complete:
            self._finish(None)

    def eof_received(self) -> None:
        self.open = False

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's: closed or broken."""
        self.open = False
        if self._parser is None:
            return
        try:
            if error is not None:
                raise TransportError(f"the connection broke: {error}")
            self._parser.end()
        except TransportError as problem:
            self._finish(problem)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        parser, done = self._parser, self._done
        self._parser = self._done = None
        if error is not None or (parser is not None and not parser.keep_alive):
            self.close()
        if done is not None and not done.done():
            if error is not None:
                done.set_exception(error)
            elif parser is not None:
                done.set_result(parser)

    async def exchange(self, request: bytes, on_body: OnBody) -> ResponseParser:
        """Send one request and follow its answer to the end.

        Raises:
            TransportError: the connection broke or did not speak HTTP. Whatever ``on_body`` raises comes out as it is.
        """
        if self._transport is None or not self.open:
            raise TransportError("the connection is closed")
        self._parser, self.heard = ResponseParser(on_body), False
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            return await self._done
        except asyncio.CancelledError:
            self._parser = self._done = None
            self.close()
            raise

    def close(self) -> None:
        """Drop it, whatever is under way."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()


@dataclass(slots=True)
class HttpClient:
    """Connections to one server, as many as there are exchanges at once. Belongs to one event loop.

    Attributes:
        headers: sent with every request.
    """

    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    _idle: list[Connection] = field(default_factory=list)

    async def exchange(self, request: bytes, on_body: OnBody) -> ResponseParser:
        """Send a request made by ``Address.request``. An idle connection that turns out to be closed is replaced.

        Raises:
            TransportError: no connection, or a broken one.
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                return await self._use(connection, request, on_body)
            except TransportError:
                if connection.heard:
                    raise  # an answer had begun, so the server has seen the request: asking again would count it twice
                break
        return await self._use(await self._connect(), request, on_body)

    async def _use(self, connection: Connection, request: bytes, on_body: OnBody) -> ResponseParser:
        parser = await connection.exchange(request, on_body)
        if connection.open:
            self._idle.append(connection)
        return parser

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self.address.tls else None
        try:
            _, connection = await loop.create_connection(Connection, self.address.host, self.address.port, ssl=context)
        except OSError as error:
            raise TransportError(f"no connection to {self.address}: {error.strerror or error}") from None
        return connection

    async def collect(self, request: bytes, most: int = MAX_BODY_BYTES) -> tuple[int, bytes]:
        """Status and body of one exchange.

        Raises:
            TransportError: it failed, or the body is longer than ``most`` bytes.
        """
        content = bytearray()

        def take(_status: int, data: bytes, _now: float) -> None:
            content.extend(data)
            if len(content) > most:
                raise TransportError(f"the answer is longer than {most} bytes")

        parser = await self.exchange(request, take)
        return parser.status, bytes(content)

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """One exchange with JSON both ways.

        Raises:
            StatusError: the status is not 2xx. TransportError: anything else went wrong.
        """
        sent = b"" if body is None else json.dumps(body).encode()
        status, content = await self.collect(self.address.request(method, path, self.headers, sent))
        if not 200 <= status < 300:
            raise StatusError(status, error_text(content))
        try:
            return json.loads(content)
        except ValueError:
            raise TransportError(f"{method} {path} was not answered with JSON") from None

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """POST ``body`` and yield the data of the events that come back, ``[DONE]`` left out.

        Raises:
            StatusError, TransportError: as ``json``; also when the stream ends without ``[DONE]``.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        splitter, refusal = EventSplitter(), bytearray()

        def take(status: int, data: bytes, _now: float) -> None:
            if status != 200:
                refusal.extend(data[:MAX_HEAD_BYTES])
                return
            for event in splitter.feed(data):
                queue.put_nowait(event)

        request = self.address.request("POST", path, self.headers, json.dumps(body).encode())
        task = asyncio.ensure_future(self.exchange(request, take))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                if event == b"[DONE]":
                    await task
                    return
                yield event
            parser = await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, HeadwayError):
                await task
        if parser.status != 200:
            raise StatusError(parser.status, error_text(bytes(refusal)))
        raise TransportError("the stream ended without [DONE]")

    async def close(self) -> None:
        """Drop all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports say goodbye a turn later
