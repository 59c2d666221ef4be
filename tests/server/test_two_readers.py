"""Whole connections, read with and without the short way around h11: the application must be asked for the same, and clients
told the same, however bytes are broken and wherever packets end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import h11
import uvicorn
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from headway.server import connection, plain
from headway.server.connection import Connection
from headway.server.logs import Seldom
from tests.examples import examples

BODY = b'{"a":1}'
TURNS = 40
"""Turns of the event loop in which all that can happen has happened."""


class Line(asyncio.Transport):
    """The server's end of a connection: keeps what is written, and gives bytes on only while they are wanted."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.closed, self.reading = b"", False, True

    def write(self, data: Any) -> None:
        assert not self.closed, "nothing is written behind the end"
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Seen(NamedTuple):
    """What one connection came to."""

    asked: list[dict[str, Any]]
    told: list[tuple[int, list[tuple[bytes, bytes]], bytes]]
    closed: bool


class Application:
    """Answers as the request's ``x-do`` says, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = ("method", "path", "raw_path", "query_string", "http_version", "headers", "client", "server", "scheme")
        asked: dict[str, Any] = {name: scope[name] for name in names}
        self.asked.append(asked)
        wish = dict(scope["headers"]).get(b"x-do", b"")
        if wish != b"early":
            asked["body"] = await whole_body(scope, receive)
        reply = json.dumps(asked, default=str).encode()
        length = [] if b"stream" in wish else [(b"content-length", b"%d" % len(reply))]
        close = [(b"connection", b"close")] if wish == b"close" else []
        await send({"type": "http.response.start", "status": 200, "headers": [*length, *close]})
        if wish == b"stream":
            await send({"type": "http.response.body", "body": reply[:5], "more_body": True})
            await asyncio.sleep(0)
            reply = reply[5:]
        await send({"type": "http.response.body", "body": reply, "more_body": False})


async def whole_body(scope: Scope, receive: Receive) -> Any:
    taken = scope.pop(plain.WHOLE_BODY, None)
    if taken is not None:
        return taken
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return (body, "gone")
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def answers(written: bytes) -> Iterator[tuple[int, list[tuple[bytes, bytes]], bytes]]:
    """What a client reads; h11 raises where it is no HTTP."""
    client, found = h11.Connection(h11.CLIENT), written
    while found:
        client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        client.receive_data(found)
        head, body = client.next_event(), b""
        while isinstance(event := client.next_event(), h11.Data):
            body += bytes(event.data)
        if not isinstance(head, h11.Response) or not isinstance(event, h11.EndOfMessage):
            yield -1, [], found  # a part of an answer
            return
        yield head.status_code, sorted(head.headers), body
        found = client.trailing_data[0]
        client = h11.Connection(h11.CLIENT)


def exchange(pieces: list[bytes], short_way: bool, patient: bool, gap: int = TURNS) -> Seen:
    """Feed one connection.

    Args:
        short_way: plain requests are read without h11.
        patient: the rest of a short body is waited for until the end; else not beyond the next turns of the loop.
        gap: turns of the loop between two pieces.
    """
    application = Application()
    config = uvicorn.Config(
        application, http=Connection, ws="none", loop="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, date_header=False, proxy_headers=False,
    )  # fmt: skip
    config.load()

    async def run() -> Seen:
        protocol = Connection(config, ServerState(), {}, asyncio.get_running_loop(), most=9, seldom=Seldom())
        line = Line()
        protocol.connection_made(line)
        for piece in pieces:
            for _ in range(9 * TURNS):
                if line.reading or line.closed:
                    break
                await asyncio.sleep(0)
            assert line.reading or line.closed, "the client is read from again when it has its answer"
            if not line.closed:
                protocol.data_received(piece)
            await turns(gap)
        if protocol._hold is not None:
            protocol._hold.cancel()
            protocol._release()
        await turns(TURNS)
        closed = line.closed
        protocol.connection_lost(None)
        await turns(TURNS)
        return Seen(application.asked, list(answers(line.written)), closed)

    with (
        patch.object(connection, "HOLD_SECONDS", 1000.0 if patient else 0.0),
        patch.object(connection, "read_plain", plain.read_plain if short_way else lambda data: None),
    ):
        return asyncio.run(run())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


TARGETS = [
    b"/v1/x",
    b"/a%20b%2fc?q=%41",
    b"/?",
    b"/%ff",
    b"//x",
    b"/a?b?c",
    b"*",
    b"http://a/b",
    b"/\xe9",
    b"/a b",
    b"",
]
NAMES = [
    b"X-A", b"x_a", b"Connection", b"Content-Length", b"Transfer-Encoding", b"Expect", b"TE", b"Upgrade", b"Host", b"X-Do",
    b"Trailer", b"X A", b"X-A ", b"", b" X-A", b"X-\xe9",
]  # fmt: skip
VALUES = [
    b"", b" b\t", b"close", b"keep-alive", b"Keep-Alive", b"keep-alive, close", b"chunked", b"7", b"07", b"+7", b"7,7", b"0",
    b"100-continue", b"trailers", b"h2c", b"b\r\n c", b"\xe9", b"b\0", b"b\x7f", b"b\rX: y", b"b\nX: y",
]  # fmt: skip
STARTS = [b"POST", b"GET", b"post", b"PUT", b" POST", b"\r\nPOST"]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.1 "]
CHUNKS = b"3\r\n%b\r\n4\r\n%b\r\n0\r\n\r\n" % (BODY[:3], BODY[3:])


def request(
    *lines: bytes,
    method: bytes = b"POST",
    target: bytes = b"/v1/x",
    version: bytes = b"HTTP/1.1",
    chunked: bool = False,
) -> bytes:
    length, body = (b"Transfer-Encoding: chunked", CHUNKS) if chunked else (b"Content-Length: 7", BODY)
    return b"\r\n".join([b" ".join((method, target, version)), b"Host: a", *lines, length, b"", body])


SOUND = request()
EDITS = st.tuples(
    st.integers(0, len(SOUND) + 10),
    st.integers(0, 2),
    st.sampled_from([b"\r\n", b"\n", b"\r", b" ", b"\0", b"\xff", b":", b"1", b"x", b""]),
)


def agree(pieces: list[bytes], patient: bool = True, gap: int = TURNS) -> None:
    """Both ways come to the same."""
    short = exchange(pieces, True, patient, gap)
    assert short == exchange(pieces, False, patient, gap), pieces


def test_the_short_way_and_h11_agree_on_every_odd_line() -> None:
    """Each before and behind a sound request, since what one reader takes for the end the other may take for more."""
    odd = [request(name + b":" + value) for name in NAMES for value in VALUES]
    odd += [request(target=target) for target in TARGETS]
    odd += [request(method=method, version=version) for method in STARTS for version in VERSIONS]
    odd += [
        request(b"X-Do: " + wish, chunked=chunked)
        for wish in (b"early", b"stream", b"close")
        for chunked in (False, True)
    ]
    odd += [SOUND.replace(b"Host: a\r\n", b""), SOUND.replace(b": 7", b": 6"), SOUND.replace(b": 7", b": 8")]
    odd += [SOUND.replace(b"Content-Length: 7\r\n", b""), SOUND.replace(b"\r\n", b"\n")]
    for each in odd:
        agree([each, SOUND])
        agree([SOUND, each])


WISHES = st.sampled_from([[], [], [b"X-Do: stream"], [b"X-Do: early"], [b"X-Do: close"], [b"X-A: b"]])


@examples(300)
@given(
    st.lists(
        st.builds(lambda lines, chunked: request(*lines, chunked=chunked), WISHES, st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.none() | EDITS,
    st.lists(st.integers(1, 4 * len(SOUND)), max_size=5),
    st.booleans(),
    st.sampled_from([1, 2, TURNS]),
)
@example([SOUND, SOUND, SOUND], None, [len(SOUND) - 3], True, TURNS)  # a body apart, and two requests with its end
@example([request(b"X-Do: stream"), SOUND, SOUND], None, [len(SOUND) + 14, 2 * len(SOUND) + 14], True, 1)
def test_the_short_way_and_h11_agree_wherever_packets_end(
    sent: list[bytes], edit: tuple[int, int, bytes] | None, cuts: list[int], patient: bool, gap: int
) -> None:
    data = b"".join(sent)
    if edit is not None:
        place, cut, piece = edit
        data = data[:place] + piece + data[place + cut :]
    places = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    agree([data[a:b] for a, b in itertools.pairwise(places) if a < b], patient, gap)


def test_the_short_way_is_taken() -> None:
    """Else the test above would compare h11 with itself."""
    with patch.object(Connection, "_begin", autospec=True, side_effect=Connection._begin) as begun:
        seen = exchange([SOUND, SOUND], short_way=True, patient=True)
        assert begun.call_count == 2
    assert [each["body"] for each in seen.asked] == [BODY, BODY] and [status for status, *_ in seen.told] == [200, 200]
