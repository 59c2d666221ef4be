"""Requests as nearly all clients write them, read and answered without h11, whose state machine takes a third of the server's
time for a short request.

A request takes this way when nothing stands before or behind it, its head is of the plainest kind (``read_plain``), and all
of it has come in one piece; many clients send head and body apart, so a short body is waited for a moment. Everything else,
what is no HTTP included, is h11's to judge, from its first byte on: this reads no request that h11 would refuse, and sees in
it what h11 would.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from uvicorn.protocols.http.h11_impl import RequestResponseCycle

MAX_PLAIN_HEAD: Final = 8 * 1024
MAX_PLAIN_LINES: Final = 64
TARGET: Final = re.compile(rb"POST (/[!-~]*) HTTP/1\.1")
LINES: Final = re.compile(rb"(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~]*)+")
LENGTH: Final = re.compile(rb"[0-9]{1,9}")
NOT_PLAIN: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer"})
"""Headers that ask for more than one body and one answer."""
STATUS_LINES: Final = {
    int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus if status >= 200
}
WHOLE_BODY: Final = "headway.whole_body"
"""Where the scope holds a plain request's body until somebody takes it."""
CLOSE: Final = (b"connection", b"close")
NO_BODY: Final = frozenset({204, 304})


class PlainRequest(NamedTuple):
    """A whole request.

    Attributes:
        target: path and query, as sent.
        headers: names in lower case, values without the blanks around them, in order.
        missing: bytes of the body that have not come.
    """

    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    missing: int


def read_plain(data: bytes) -> PlainRequest | None:
    """The request that ``data`` is, or begins: one POST, no byte more, and a head that needs no judgement. None: h11's."""
    end = data.find(b"\r\n\r\n", 0, MAX_PLAIN_HEAD)
    first = data.find(b"\r\n", 0, end + 2)
    if end < 0 or data.count(b"\n", 0, end) > MAX_PLAIN_LINES:
        return None
    target = TARGET.fullmatch(data, 0, first)
    if target is None or LINES.fullmatch(data, first, end) is None:
        return None
    headers = []
    length, hosts = -1, 0
    for line in data[first + 2 : end].split(b"\r\n"):
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        headers.append((name, value))
        if name == b"content-length":
            if length >= 0 or LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name == b"host":
            hosts += 1
        elif name in NOT_PLAIN or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
    missing = end + 4 + length - len(data)
    if hosts != 1 or length < 0 or missing < 0:
        return None
    return PlainRequest(target[1], headers, data[end + 4 :], missing)


class PlainCycle(RequestResponseCycle):
    """The answer to a plain request: uvicorn's ``receive``, and a ``send`` that writes an answer of one piece in one go."""

    _head: dict[str, Any] | None = None
    _begun = _chunked = False

    async def receive(self) -> Any:
        """ASGI's. The body, unless it was taken from the scope; then nothing until the client has left or has its answer."""
        body = self.scope.pop(WHOLE_BODY, None)  # type: ignore[typeddict-item]
        if body is None:
            return await super().receive()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        """ASGI's. The start waits for the first piece of the body. Raises RuntimeError for what is no answer."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if self._head is None and kind == "http.response.start":
            self._head, self.response_started = message, True
            return
        if self._head is None or kind != "http.response.body" or self.response_complete:
            raise RuntimeError(f"no answer goes on with {kind!r}")
        self._write(self._head, message.get("body", b""), message.get("more_body", False))
        if self.response_complete:
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _write(self, head: dict[str, Any], body: bytes, more: bool) -> None:
        pieces = []
        if not self._begun:
            self._begun = True
            pieces.append(self._start(head, body, more))
        if self._chunked and body:
            pieces += (b"%x\r\n" % len(body), body, b"\r\n")
        elif body:
            pieces.append(body)
        if not more:
            self.response_complete = True
            if self._chunked:
                pieces.append(b"0\r\n\r\n")
        if pieces:
            self.transport.write(b"".join(pieces))

    def _start(self, head: dict[str, Any], body: bytes, more: bool) -> bytes:
        """Status line and headers. An answer of several pieces is chunked."""
        status, headers = head["status"], [(name.lower(), value) for name, value in head.get("headers", ())]
        lengths = [value for name, value in headers if name == b"content-length"]
        if status in NO_BODY:
            if body or more:
                raise RuntimeError(f"an answer with status {status} has no body")
        elif lengths:
            if more or int(lengths[0]) != len(body):
                raise RuntimeError("the body is not as long as its Content-Length")
        elif more:
            self._chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        else:
            headers.append((b"content-length", b"%d" % len(body)))
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append(CLOSE)
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        return line + _lines(headers) + b"\r\n"


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    made = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if not made.count(b"\r") == made.count(b"\n") == len(headers):
        raise RuntimeError("a header has a line break")
    return made
