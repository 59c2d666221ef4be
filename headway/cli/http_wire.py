"""HTTP/1.1 and event streams as bytes, without a socket: requests written, answers parsed as they come.

Framing follows RFC 9112, event streams follow the HTML standard's section on server-sent events (a lone CR as the end of
a line, which no server sends, excepted). Parsing is incremental and holds no more than one unfinished line, so an event
costs a few microseconds and its time of arrival is the time of the read that completed it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from headway.core.errors import ConfigError, HeadwayError

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_EVENT_BYTES: Final = 16 * 2**20

OnBody = Callable[[int, bytes, float], None]
"""Takes the status, a piece of the decoded body and the time (``perf_counter``) at which it was read."""


class TransportError(HeadwayError):
    """The connection failed, or what came over it is not HTTP."""


class StatusError(HeadwayError):
    """The server answered with an error.

    Args:
        status: HTTP status.
        text: what it said, shortened.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. ``prefix`` is the path before its endpoints, without a slash at the end."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """From ``http://host:port[/prefix]``.

        Raises:
            ConfigError: it is no such address.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not an address of a server; http://127.0.0.1:8000 would be one")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self._authority()}{self.prefix}"

    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        """A whole request as bytes.

        Raises:
            ConfigError: a header would break the request.
        """
        given = {"Host": self._authority(), "Accept": "*/*", **headers}
        if body:
            given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in given.items():
            if not name or any(c in name + value for c in "\r\n\0") or set(name) & set(" :"):
                raise ConfigError(f"header {name!r} has a character that HTTP does not allow")
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        try:
            return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
        except UnicodeEncodeError as error:
            raise ConfigError(f"a header or the path has a character that HTTP does not allow: {error}") from None


class ResponseParser:
    """Bytes of one response in, pieces of its body out.

    Attributes:
        status, headers: of the response; 0 and empty until its head has come. Header names are lower case.
        complete: the whole response has come.
        keep_alive: the connection may be used again.
    """

    def __init__(self, on_body: OnBody) -> None:
        self._on_body = on_body
        self._rest = b""
        self._left = 0
        self._read: Callable[[bytes, int, float], int] = self._head
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = True

    def feed(self, data: bytes, now: float) -> None:
        """Take what was read at ``now``. Raises TransportError for what is not HTTP."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while at < end and not self.complete:
            after = self._read(data, at, now)
            if after < 0:
                break
            at = after
        self._rest = data[at:]
        if len(self._rest) > MAX_HEAD_BYTES:
            raise TransportError("the server's headers or chunk sizes are longer than any server's should be")
        if self.complete and self._rest:
            self.keep_alive = False  # it speaks out of turn

    def end(self) -> None:
        """The server has closed. Raises TransportError if something is missing."""
        self.keep_alive = False
        if self._read == self._until_close:
            self.complete = True
        if not self.complete:
            raise TransportError("the server closed the connection in the middle of its answer")

    def _head(self, data: bytes, at: int, now: float) -> int:
        border = data.find(b"\r\n\r\n", at)
        if border < 0:
            return -1
        first, *lines = data[at:border].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not (words[1].isascii() and words[1].isdigit()):
            raise TransportError(f"not an HTTP/1 answer: {first[:80]!r}")
        status = int(words[1])
        if 100 <= status < 200:
            return border + 4
        self.status = status
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (words[0] != "HTTP/1.0" or "keep-alive" in connection)
        self._choose_framing()
        return border + 4

    def _choose_framing(self) -> None:
        length = self.headers.get("content-length")
        if self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._read = self._chunk_size
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise TransportError(f"not a Content-Length: {length[:80]!r}")
            self._left = int(length)
            self._read = self._counted
            self.complete = self._left == 0
        elif self.status in (204, 304):
            self.complete = True
        else:
            self._read = self._until_close

    def _counted(self, data: bytes, at: int, now: float) -> int:
        piece = data[at : at + self._left]
        self._left -= len(piece)
        self.complete = self._left == 0
        self._on_body(self.status, piece, now)
        return at + len(piece)

    def _until_close(self, data: bytes, at: int, now: float) -> int:
        self._on_body(self.status, data[at:], now)
        return len(data)

    def _chunk_size(self, data: bytes, at: int, now: float) -> int:
        border = data.find(b"\r\n", at)
        if border < 0:
            return -1
        digits = data[at:border].partition(b";")[0].strip()
        try:
            size = int(digits, 16)
        except ValueError:
            size = -1
        if size < 0 or not digits.isalnum():
            raise TransportError(f"not the size of a chunk: {digits[:80]!r}")
        self._left = size
        self._read = self._chunk if size else self._trailer
        return border + 2

    def _chunk(self, data: bytes, at: int, now: float) -> int:
        piece = data[at : at + self._left]
        self._left -= len(piece)
        if not self._left:
            self._read = self._chunk_end
        self._on_body(self.status, piece, now)
        return at + len(piece)

    def _chunk_end(self, data: bytes, at: int, now: float) -> int:
        if len(data) - at < 2:
            return -1
        if data[at : at + 2] != b"\r\n":
            raise TransportError("a chunk is longer than it says")
        self._read = self._chunk_size
        return at + 2

    def _trailer(self, data: bytes, at: int, now: float) -> int:
        border = data.find(b"\r\n", at)
        if border < 0:
            return -1
        self.complete = border == at
        return border + 2


class EventSplitter:
    """Pieces of an event stream in, the data of whole events out."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Events completed by ``data``. Raises TransportError when one has no end."""
        simple = not self._rest and not self._lines
        if simple and data[:6] == b"data: " and data[-2:] == b"\n\n" and data.find(b"\n") == len(data) - 2:
            return [data[6:-2]]  # how nearly all arrive: one event, whole
        events = []
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines, self._size = [], 0
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise TransportError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events


def error_text(body: bytes) -> str:
    """What an error body says: OpenAI's ``error.message`` if it is one, its beginning otherwise."""
    text = body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        found = json.loads(text)
        error = found.get("error") or found
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
        text = text if message is None else str(message)
    return " ".join(text[:500].split()) or "(no message)"
