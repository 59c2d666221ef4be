"""A connection's second request, and its second pause, are treated like its first: nothing of the first is kept, and no clock
is lost. The protocol runs on a loop whose clocks stand still and are counted."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from headway.server import connection
from headway.server.connection import HEADER_SECONDS, KEEP_ALIVE_SECONDS, WRITE_SECONDS, BoundedH11, Connection
from headway.server.logs import Seldom


class Clock:
    """What ``call_later`` gives."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.cancelled = seconds, False

    def cancel(self) -> None:
        self.cancelled = True


class StoppedLoop:
    """The running loop, with clocks that never strike."""

    def __init__(self) -> None:
        self._loop, self._clocks = asyncio.get_running_loop(), list[Clock]()

    def call_later(self, seconds: float, *_: Any) -> Clock:
        self._clocks.append(Clock(seconds))
        return self._clocks[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    @property
    def running(self) -> list[float]:
        """Seconds of the clocks that run."""
        return sorted(clock.seconds for clock in self._clocks if not clock.cancelled)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """There is nothing to be paused."""

    def resume_reading(self) -> None:
        """The same."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and answers with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(b"%d" % size))]}
    )
    await send({"type": "http.response.body", "body": b"%d" % size})


async def talk(one: Connection, loop: StoppedLoop, wire: Wire, state: ServerState) -> None:
    """Three requests, and half of one."""
    assert loop.running == [HEADER_SECONDS]
    for number in range(1, 4):
        one.data_received(b"POST / HTTP/1.1\r\nHost: x\r\n")
        assert loop.running == [HEADER_SECONDS], number
        one.data_received(b"Content-Length: 2\r\n\r\n")
        assert loop.running == [], number
        for _ in range(2):
            one.pause_writing()
            one.pause_writing()
            assert loop.running == [WRITE_SECONDS], number
            one.resume_writing()
            assert loop.running == [], number
        one.data_received(b"ab")
        while state.tasks:
            await asyncio.wait(state.tasks)
            await asyncio.sleep(0)
        assert loop.running == [KEEP_ALIVE_SECONDS], number
        assert wire.written.count(b"200 OK") == number and not wire.closed
    one.pause_writing()
    one.data_received(b"POST / HTT")


def test_clocks_of_each_request_and_of_each_pause() -> None:
    async def body() -> None:
        loop, wire, state = StoppedLoop(), Wire(), ServerState()
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE_SECONDS)
        one = Connection(config, state, {}, loop, most=1, seldom=Seldom())
        one.connection_made(wire)
        try:
            await talk(one, loop, wire, state)
        finally:
            one.connection_lost(None)
        assert loop.running == [], "a connection that has gone has no clocks"

    asyncio.run(body())


def events(server: BoundedH11, sizes: list[int]) -> int:
    """Bytes of a body in chunks of these sizes, which the client sends in a request of its own; the server answers it."""
    client = h11.Connection(h11.CLIENT)
    sent = client.send(
        h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Transfer-Encoding", "chunked")])
    )
    assert sent is not None
    server.receive_data(sent)
    assert isinstance(server.next_event(), h11.Request)
    found = 0
    for size in sizes:
        piece = client.send(h11.Data(data=bytes(size)))
        assert piece is not None
        server.receive_data(piece)
        event = server.next_event()
        assert isinstance(event, h11.Data)
        found += len(event.data)
    end = client.send(h11.EndOfMessage())
    assert end is not None
    server.receive_data(end)
    assert isinstance(server.next_event(), h11.EndOfMessage)
    server.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
    server.send(h11.EndOfMessage())
    server.start_next_cycle()
    return found


@pytest.mark.parametrize("before", [[1] * 4, [4096], [1, 4096]], ids=["small", "large", "both"])
def test_a_body_neither_pays_for_the_one_before_nor_is_excused_by_it(
    monkeypatch: pytest.MonkeyPatch, before: list[int]
) -> None:
    monkeypatch.setattr(connection, "FREE_CHUNKS", 4)
    server = BoundedH11()
    assert events(server, before) == sum(before)
    assert events(server, [1] * 4) == 4, "so many are free"
    with pytest.raises(h11.RemoteProtocolError):
        events(server, [1] * 5)
