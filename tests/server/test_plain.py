"""Requests that are read without h11: what is taken, that h11 would take the same, and what the client gets for it."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import socket
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from headway.server import connection, plain
from headway.server.connection import BoundedH11
from headway.server.door import Door
from headway.server.lifecycle import Lifecycle, Phase
from headway.server.plain import PlainCycle, PlainRequest, read_plain
from headway.server.settings import ServerSettings
from tests.examples import examples
from tests.server.live import Live, live_parrot
from tests.server.test_live import raw

HEAD = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"


def request(body: bytes = b"{}", more: bytes = b"") -> bytes:
    return HEAD % (len(body), more) + body


def by_h11(data: bytes) -> PlainRequest | None:
    """What h11 reads of it; None: it refuses it, or finds less or more than one request."""
    import h11

    conn = BoundedH11()
    conn.receive_data(data)
    try:
        head, body = conn.next_event(), b""
        while isinstance(event := conn.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        return None
    if not isinstance(event, h11.EndOfMessage) or conn.trailing_data[0] or conn.they_are_waiting_for_100_continue:
        return None
    assert isinstance(head, h11.Request) and conn.their_state is h11.DONE
    return PlainRequest(head.target, [(name.lower(), value) for name, value in head.headers], body, 0)


def test_a_plain_request_is_read_as_h11_reads_it() -> None:
    data = request(b'{"a":1}', b"X-Odd:  two words\t \r\nACCEPT:*/*\r\nConnection: Keep-Alive\r\nX-Empty:\r\n")
    found = read_plain(data)
    assert found == by_h11(data) and found is not None
    assert found.target == b"/v1/completions?x=1" and found.body == b'{"a":1}' and not found.missing
    assert (b"x-odd", b"two words") in found.headers and (b"x-empty", b"") in found.headers
    lines = b"A: b\r\n" * (plain.MAX_PLAIN_LINES - 4)
    assert read_plain(request(more=lines)) is not None and read_plain(request(more=lines + b"A: b\r\n" * 2)) is None
    part = read_plain(data[:-3])
    assert part is not None and (part.body, part.missing) == (b'{"a"', 3)


@pytest.mark.parametrize(
    "data",
    [
        request() + b"G",  # the next request
        request()[:-4],  # a head that goes on
        request(more=b"Transfer-Encoding: chunked\r\n"),
        request(more=b"Expect: 100-continue\r\n"),
        request(more=b"Upgrade: websocket\r\n"),
        request(more=b"Connection: close\r\n"),
        request(more=b"Connection: keep-alive, upgrade\r\n"),
        request(more=b"Content-Length: 2\r\n"),
        request(more=b"Host: other\r\n"),
        request(more=b"X-Folded: a\r\n b\r\n"),
        request(more=b"X-Blank : a\r\n"),
        request(more=b": a\r\n"),
        request(more=b"X-Bare: a\nHost: b\r\n"),
        request(more=b"X-Return: a\rb\r\n"),
        request(more=b"X-Nul: \0\r\n"),
        request(more=b"X-Latin: \xe9\r\n"),
        request(more=b"X-Long: " + b"a" * plain.MAX_PLAIN_HEAD + b"\r\n"),
        request(more=b"A: b\r\n" * plain.MAX_PLAIN_LINES),
        request().replace(b"Length: 2", b"Length: +2"),
        request().replace(b"Length: 2", b"Length: 2, 2"),
        request().replace(b"Length: 2", b"Length: 0x2"),
        request().replace(b"Content-Length: 2\r\n", b""),
        request().replace(b"Host: localhost\r\n", b""),
        request().replace(b"HTTP/1.1", b"HTTP/1.0"),
        request().replace(b"POST", b"GET"),
        request().replace(b"POST /", b"POST http://localhost/"),
        request().replace(b"POST ", b"POST  "),
        request().replace(b"?x=1", b"?x= 1"),
        b"\r\n" + request(),
    ],
)
def test_what_needs_judgement_is_h11s(data: bytes) -> None:
    assert read_plain(data) is None


PIECES = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b" ", b":", b"\t", b"\0", b"\xff", b"Host: a\r\n", b"Content-Length: 2\r\n", b"Content-Length",
     b"+", b"0", b"1", b"2", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"{}", b"POST / HTTP/1.1\r\n", b"x"]
)  # fmt: skip


@examples(1500)
@given(st.lists(st.tuples(st.integers(0, 160), st.integers(0, 3), PIECES), max_size=4), st.lists(PIECES, max_size=6))
def test_h11_would_take_whatever_is_taken_and_see_the_same(
    edits: list[tuple[int, int, bytes]], lines: list[bytes]
) -> None:
    data = request(b"{}", b"".join(lines))
    for place, cut, piece in edits:
        data = data[:place] + piece + data[place + cut :]
    found = read_plain(data)
    if found is not None and not found.missing:
        assert found == by_h11(data), data


class Wire(asyncio.Transport):
    """Notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = list[bytes](), False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def cycle() -> tuple[PlainCycle, Wire, list[int]]:
    wire, ended = Wire(), list[int]()
    flow, conn = SimpleNamespace(write_paused=False), SimpleNamespace(they_are_waiting_for_100_continue=False)
    options: dict[str, Any] = {
        "scope": {"headers": []}, "conn": conn, "transport": wire, "flow": flow, "logger": None, "access_logger": None,
        "access_log": False, "default_headers": [], "message_event": asyncio.Event(), "on_response": lambda: ended.append(1),
    }  # fmt: skip
    made = PlainCycle(**options)
    return made, wire, ended


def told(status: int, headers: list[tuple[bytes, bytes]], *bodies: bytes) -> tuple[bytes, bool, int]:
    """What is written for an answer, whether the connection is closed, and how many writes that took."""

    async def answer() -> tuple[bytes, bool, int]:
        made, wire, ended = cycle()
        await made.send({"type": "http.response.start", "status": status, "headers": headers})
        for number, body in enumerate(bodies, 1):
            await made.send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})
        assert ended == [1] and made.response_complete
        return b"".join(wire.written), wire.closed, len(wire.written)

    return asyncio.run(answer())


def test_answers_are_written_as_http() -> None:
    assert told(200, [(b"Content-Length", b"2")], b"{}") == (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        False,
        1,
    )
    assert told(200, [], b"{}")[0] == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    assert told(499, [], b"")[0] == b"HTTP/1.1 499 \r\ncontent-length: 0\r\n\r\n"
    assert told(204, [], b"")[0] == b"HTTP/1.1 204 No Content\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert told(200, [], b"a" * 17, b"", b"b", b"") == (
        head + b"11\r\n" + b"a" * 17 + b"\r\n1\r\nb\r\n0\r\n\r\n",
        False,
        3,
    )
    written, closed, _ = told(503, [(b"connection", b"close")], b"")
    assert closed and written.count(b"connection: close\r\n") == 1


@pytest.mark.parametrize(
    ("headers", "bodies"),
    [
        ([(b"x", b"a\r\nset-cookie: b")], [b""]),
        ([(b"x", b"a\nb")], [b""]),
        ([(b"content-length", b"3")], [b"{}"]),
        ([(b"content-length", b"2")], [b"{", b"}"]),
    ],
)
def test_answers_that_would_break_the_connection_are_not_written(headers: Any, bodies: list[bytes]) -> None:
    with pytest.raises(RuntimeError, match=r"line break|Content-Length"):
        told(200, headers, *bodies)


def test_a_request_is_gone_when_it_is_answered() -> None:
    """Not only when garbage is collected: its body may be large."""
    died: list[int] = []

    class Sender:
        async def __call__(self, message: Any) -> None:
            pass

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def one() -> None:
        door = Door(app, ServerSettings(allowed_hosts=["*"], access_log=False), Lifecycle(Phase.READY))
        sender: Any = Sender()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}}
        sender.scope = scope  # as a connection's cycle has it
        weakref.finalize(sender, died.append, 1)
        await door(scope, None, sender)  # type: ignore[arg-type]

    gc.collect()
    gc.disable()
    try:
        asyncio.run(one())
        assert died == [1]
    finally:
        gc.enable()


# -- behind a socket ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_parrot() as live:
        yield live.wait_ready()


def ask(prompt: str, **more: Any) -> bytes:
    return request(json.dumps({"prompt": prompt, "max_tokens": 9} | more).encode())


def answer(live: socket.socket) -> tuple[int, dict[str, str], Any]:
    found = http.client.HTTPResponse(live)
    found.begin()
    body = found.read()
    return found.status, {name.lower(): value for name, value in found.getheaders()}, json.loads(body)


def test_both_ways_give_the_same_answer(server: Live) -> None:
    """In turn on one connection: whole, head and body apart, and in a form that h11 reads."""
    odd = ask("hello").replace(b"Host:", b"X-Latin: \xe9\r\nHost:")
    with raw(server) as live:
        seen = []
        for sent in (ask("hello"), odd, ask("hello"), odd):
            live.sendall(sent)
            status, headers, body = answer(live)
            assert headers.pop("x-request-id") and headers.pop("date")
            seen.append((status, headers, body["choices"], body["usage"]))
        assert all(each == seen[0] for each in seen) and seen[0][0] == 200 and seen[0][2][0]["text"] == "hello"
        head, body = ask("hello").split(b"\r\n\r\n")
        live.sendall(head + b"\r\n\r\n")
        live.sendall(body)
        assert answer(live)[2]["choices"] == seen[0][2]


@pytest.mark.parametrize("together", [False, True])
def test_requests_that_come_before_their_turn_are_answered_in_order(server: Live, together: bool) -> None:
    first = ask("slow " * 40, stream=True, max_tokens=200)
    with raw(server) as live, live.makefile("rb") as reader:
        live.sendall(first + ask("second") + ask("third") if together else first)
        status = reader.readline()
        if not together:  # the first one is being answered
            live.sendall(ask("second"))
            live.sendall(ask("third"))
        assert status == b"HTTP/1.1 200 OK\r\n"
        for line in iter(reader.readline, b"0\r\n"):
            assert b"second" not in line
        assert reader.readline() == b"\r\n"
        for word in ("second", "third"):
            assert reader.readline() == status
            heads = dict(line.rstrip().split(b": ") for line in iter(reader.readline, b"\r\n"))
            assert json.loads(reader.read(int(heads[b"content-length"])))["choices"][0]["text"] == word


def test_a_head_whose_body_stays_out_is_refused_without_it(server: Live) -> None:
    """The application has the head after a moment, as ever: it refuses what it would not read."""
    head, _ = ask("hello").split(b"\r\n\r\n")
    with raw(server) as live:
        live.sendall(head.replace(b"application/json", b"text/plain") + b"\r\n\r\n")
        assert answer(live)[0] == 415


def test_a_stream_on_a_plain_request_ends_with_its_last_chunk(server: Live) -> None:
    with raw(server) as live:
        live.sendall(ask("hello", stream=True))
        found = http.client.HTTPResponse(live)
        found.begin()
        assert found.getheader("transfer-encoding") == "chunked"
        assert found.read().endswith(b"data: [DONE]\n\n")
        live.sendall(ask("again"))
        assert answer(live)[2]["choices"][0]["text"] == "again"


@pytest.mark.parametrize("size", [connection.HELD_BYTES, connection.HELD_BYTES + 1])
def test_a_body_apart_from_its_head(server: Live, size: int) -> None:
    """Waited for, or with one byte more h11's."""
    head, body = ask("hello").split(b"\r\n\r\n")
    body += b" " * (size - len(body))
    head = head[: head.rindex(b" ") + 1] + b"%d" % size
    with raw(server) as live:
        for cut in (0, 1, size - 1):
            live.sendall(head + b"\r\n\r\n" + body[:cut])
            live.sendall(body[cut:])
            assert answer(live)[2]["choices"][0]["text"] == "hello"


def test_a_body_that_is_too_long_is_refused(server: Live) -> None:
    assert connection.HELD_BYTES < 2**20
    with live_parrot(max_body_bytes=1024) as small, raw(small.wait_ready()) as live:
        live.sendall(ask("a" * 2000))
        status, _, body = answer(live)
        assert (status, body["error"]["code"]) == (413, "body_size")
