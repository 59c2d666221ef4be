"""What arrives on a connection and is not plain HTTP/1.1 as most clients write it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, live_parrot
from tests.server.test_live import is_free, raw


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_parrot() as live:
        yield live.wait_ready()


def exchange(server: Live, request: bytes) -> tuple[int, Any]:
    """Status and JSON of the answer to one request, whose connection the server closes."""
    with raw(server) as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        found = answer.status, json.loads(answer.read())
        assert connection.recv(1) == b""
    return found


def test_a_target_with_scheme_and_host(server: Live) -> None:
    """As proxies send it. The host in it counts, so it must be one that is served."""

    def get(target: str, host: str = "127.0.0.1") -> tuple[int, Any]:
        head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        return exchange(server, head.encode())

    assert get(f"http://127.0.0.1:{server.port}/version") == get("/version")
    assert get("HTTP://localhost/v1%2Fmodels/parrot?x=1", host="ignored.example")[0] == 200
    assert get("http://somewhere.example/version")[1]["error"]["code"] == "host"
    assert get("ftp://127.0.0.1/version")[0] == get("/http://127.0.0.1/version")[0] == 404


def test_two_lengths_are_one_too_many(server: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = json.dumps({"prompt": "x"}).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    status, error = exchange(server, head + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert (status, error["error"]["code"]) == (400, "http")


def test_a_body_that_stops_being_http(server: Live) -> None:
    """The head was fine, the handler waits for the body, and then comes no chunk."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    lines = len(server.lines)
    status, error = exchange(server, head + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n")
    assert (status, error["error"]["code"]) == (400, "http")
    assert is_free(server)
    assert not [line for line in server.lines[lines:] if "ERROR" in line or "Traceback" in line]


def test_what_is_no_http_gets_an_error_as_clients_read_them(server: Live) -> None:
    for junk in (b"POST /v1/completions HTTP/1.1\r\n\r\n", b"\x16\x03\x01junk\r\n\r\n"):
        status, error = exchange(server, junk)
        assert (status, error["error"]["code"]) == (400, "http")
