"""HTTP and event streams over hostile borders, broken connections and wrong answers."""

from __future__ import annotations

import asyncio
import random

import pytest

from headway.cli.http_client import HttpClient
from headway.cli.http_wire import (
    MAX_HEAD_BYTES,
    Address,
    EventSplitter,
    ResponseParser,
    StatusError,
    TransportError,
    error_text,
)
from headway.core.errors import ConfigError
from tests.cli.fake_server import Answer, completion, event, serving

BODY = b"".join(completion(5))


def parse(raw: bytes, borders: list[int]) -> tuple[ResponseParser, bytes]:
    """Feed ``raw`` in pieces that end at ``borders``."""
    got = bytearray()
    parser = ResponseParser(lambda status, data, now: got.extend(data))
    for start, end in zip([0, *borders], [*borders, len(raw)]):
        parser.feed(raw[start:end], 0.0)
    return parser, bytes(got)


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("seed", range(25))
def test_any_borders_give_the_same_body(framing: str, seed: int) -> None:
    raw = Answer(completion(5), framing=framing).raw()
    rng = random.Random(seed)
    borders = sorted(rng.sample(range(1, len(raw)), min(seed * 7, len(raw) - 1))) if seed < 24 else range(1, len(raw))
    parser, body = parse(raw, list(borders))
    assert body == BODY
    assert parser.status == 200
    assert parser.complete == (framing != "close")
    parser.end()
    assert parser.complete


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints", "199 Later"])
def test_what_comes_before_an_answer_is_not_the_answer(status: str) -> None:
    before = f"HTTP/1.1 {status}\r\nContent-Length: 3\r\nConnection: close\r\nLink: </x>\r\n\r\n".encode()
    raw = Answer(completion(5), framing="chunked").raw()
    for borders in ([], [5], [len(before)], [len(before) + 3]):
        parser, body = parse(2 * before + raw, borders)
        assert (parser.status, body, parser.complete, parser.keep_alive) == (200, BODY, True, True)
        assert "link" not in parser.headers


def test_a_stream_may_be_longer_than_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.http_wire.MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    for _ in range(30):
        assert splitter.feed(b"data: one\ndata:") == []
        assert splitter.feed(b" two\n\n") == [b"one\ntwo"]


@pytest.mark.parametrize("seed", range(20))
def test_any_borders_give_the_same_events(seed: int) -> None:
    lines = b": hello\n\ndata: one\r\n\r\nid: 3\ndata:two\ndata: more\nretry: 5\n\n\n\ndata: \xc3\xa9\n\ndata: last\n"
    rng, splitter, found = random.Random(seed), EventSplitter(), []
    while lines:
        size = rng.randint(1, 1 + seed)
        found += splitter.feed(lines[:size])
        lines = lines[size:]
    assert found == [b"one", b"two\nmore", b"\xc3\xa9"]  # the last one never ended
    assert splitter.feed(b"\n") == [b"last"]


def test_an_event_after_an_unfinished_one_is_not_taken_for_whole() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"data: b\n\n") == [b"a\nb"]
    assert splitter.feed(b"dat") == []
    assert splitter.feed(b"a: c\n\n") == [b"c"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP/1 answer"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP/1 answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "size of a chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "size of a chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", "longer than it says"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_HEAD_BYTES + b"\r\n", "longer than"),
    ],
)
def test_what_is_not_http_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        parse(raw, [])


def test_an_answer_cut_short_is_an_error() -> None:
    for framing in ("chunked", "length"):
        raw = Answer(completion(5), framing=framing).raw()
        for cut in range(len(raw)):
            parser, _ = parse(raw[:cut], [])
            with pytest.raises(TransportError, match="middle"):
                parser.end()


def test_an_endless_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.http_wire.MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    with pytest.raises(TransportError, match="longer"):
        for _ in range(30):
            splitter.feed(b"data: 123\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://h:80/", "http://h"),
        ("h:8000", "http://h:8000"),
        ("https://h/v", "https://h/v"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert str(Address.parse(text)) == shown
    assert Address.parse(shown) == Address.parse(text)


@pytest.mark.parametrize("text", ["ftp://h", "http://", "http://h:x", "http://h?q=1", "http://h:99999"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ConfigError):
        Address.parse(text)


def test_headers_cannot_break_a_request() -> None:
    address = Address("h", 1)
    for headers in ({"A": "b\r\nC: d"}, {"A B": "c"}, {"": "x"}, {"A": "\u20ac"}):
        with pytest.raises(ConfigError):
            address.request("GET", "/", headers)


def test_connections_are_reused_and_replaced_when_they_were_closed() -> None:
    async def ask(url: str, times: int) -> None:
        client = HttpClient(Address.parse(url))
        for _ in range(times):
            assert [e async for e in client.events("/v1/completions", {"n": 1})] == [
                e[6:-2] for e in completion(3)[:-1]
            ]
        await client.close()

    with serving() as server:
        asyncio.run(ask(server.url, 5))
        assert server.num_connections == 1
    with serving(hang_up=True) as server:
        asyncio.run(ask(server.url, 5))
        assert (server.num_connections, len(server.requests)) == (5, 5)


@pytest.mark.parametrize(("cut", "asked"), [(0, 3), (30, 2)])
def test_a_request_is_repeated_only_if_its_answer_had_not_begun(cut: int, asked: int) -> None:
    """A kept connection that the server drops as the next request comes: the race of every keep-alive."""
    answers = iter([Answer(), Answer(cut=cut), Answer()])

    async def ask(url: str) -> list[str]:
        client, outcomes = HttpClient(Address.parse(url)), []
        for _ in range(2):
            try:
                outcomes.append(str(len([e async for e in client.events("/v1/completions", {})])))
            except TransportError as error:
                outcomes.append(str(error)[-6:])
        await client.close()
        return outcomes

    with serving(lambda _: next(answers)) as server:
        assert asyncio.run(ask(server.url)) == ["4", "4" if cut == 0 else "answer"]
    assert len(server.requests) == asked


def test_a_server_that_speaks_out_of_turn_is_not_asked_again() -> None:
    raw = Answer(framing="length").raw()
    parser, _ = parse(raw + b"HTTP/1.1 200", [])
    assert parser.complete and not parser.keep_alive
    assert parse(raw, [])[0].keep_alive


def test_events_tells_what_went_wrong() -> None:
    async def ask(url: str) -> list[bytes]:
        client = HttpClient(Address.parse(url))
        try:
            return [e async for e in client.events("/v1/completions", {})]
        finally:
            await client.close()

    refusal = Answer([b'{"error": {"message": "too long"}}'], status=400, framing="length")
    with serving(lambda _: refusal) as server, pytest.raises(StatusError, match="400: too long"):
        asyncio.run(ask(server.url))
    with serving(lambda _: Answer(cut=200)) as server, pytest.raises(TransportError, match="middle"):
        asyncio.run(ask(server.url))
    with serving(lambda _: Answer([event({})])) as server, pytest.raises(TransportError, match="DONE"):
        asyncio.run(ask(server.url))
    with pytest.raises(TransportError, match="no connection"):
        asyncio.run(ask(server.url))  # nobody listens there any more


def test_json_answers() -> None:
    async def ask(url: str) -> object:
        client = HttpClient(Address.parse(url))
        try:
            return await client.json("GET", "/v1/models")
        finally:
            await client.close()

    with serving() as server:
        assert asyncio.run(ask(server.url)) == {"data": [{"id": "fake-model"}]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "a"}}', "a"),
        (b'{"error": "b"}', "b"),
        (b'{"detail": "c"}', "c"),
        (b"plain\n text", "plain text"),
        (b"", "(no message)"),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_error_texts(body: bytes, text: str) -> None:
    assert error_text(body) == text
