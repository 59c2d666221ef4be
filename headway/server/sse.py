"""Server-sent events: one response class for all streams, and bytes made with as little work per token as possible.

A stream that falls behind, because its client reads slowly or the event loop is busy, finds several tokens in its next
output and sends them as one event: the work per token shrinks as the load grows.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.server.connection import WRITE_CHUNK
from headway.server.door import RAW_SEND
from headway.server.errors import ApiError, as_api_error
from headway.server.service import GONE, ClientGoneError, log_error, time_limit, until_gone

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect what should flow
)

encode: Final = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One event with JSON data."""
    return b"data: " + encode(value) + b"\n\n"


class EventStream(Response):
    """Sends events until they end, the client leaves, or the time is over.

    The status waits for the first event: a request that fails before it gets a proper error answer. A later failure is an
    event with an OpenAI error body, and the stream still ends as streams do.

    Args:
        events: bytes of one or more whole events each.
        seconds: time limit, 0 for none.
        last: what ends the stream.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], seconds: float, last: bytes = DONE) -> None:
        self._events = events
        self._seconds = seconds
        self._last = last
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(scope, receive, self._run(scope, receive, send))
        except ClientGoneError:
            log_error(scope, GONE)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            started = False
            try:
                async with time_limit(self._seconds):
                    first = await anext(self._events)
                    await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                    started = True
                    # Behind the start, the wrappers around ``send`` have nothing more to do.
                    send = scope.get(RAW_SEND, send)
                    await send({"type": "http.response.body", "body": first, "more_body": True})
                    write = scope.get("state", {}).get(WRITE_CHUNK) if scope.get("http_version") == "1.1" else None
                    async for piece in self._events:
                        if write is None or not write(piece):
                            await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": self._last, "more_body": False})
            except Exception as error:
                known = as_api_error(error)
                if known is None:
                    log_error(scope, "internal")
                    raise
                log_error(scope, known.code)
                if started:
                    await send({"type": "http.response.body", "body": _sorry(known) + self._last, "more_body": False})
                else:
                    await known.response()(scope, receive, send)


class Job(Protocol):
    """One checked request of a generating route."""

    async def whole(self) -> Response:
        """The answer in one piece."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""


async def respond(request: Request, job: Job, stream: bool | None, seconds: float, last: bytes = DONE) -> Response:
    """The answer, streamed or whole; it ends when the client leaves. ``seconds``, ``last``: see EventStream."""
    if stream:
        return EventStream(job.events(), seconds, last)

    async def whole() -> Response:
        async with time_limit(seconds):
            return await job.whole()

    return await until_gone(request.scope, request.receive, whole())


def _sorry(error: ApiError) -> bytes:
    return b"data: " + error.json() + b"\n\n"


class Chunks:
    """Chunks of one streamed answer; all but the news is encoded once.

    Args:
        kind: the chunk's ``object``.
        usage: whether the stream ends with a usage chunk, and so has ``"usage": null`` in the others.
    """

    def __init__(self, name: str, kind: str, created: int, model: str, usage: bool) -> None:
        frame = {"id": name, "object": kind, "created": created, "model": model}
        self._frame = b"data: " + encode(frame)[:-1]
        self._heads: dict[int, bytes] = {}
        self._tail = b'}],"usage":null}\n\n' if usage else b"}]}\n\n"

    def choice(
        self,
        index: int,
        news: bytes,
        *,
        logprobs: bytes = b"null",
        finish: str | None = None,
        stop_reason: int | str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """One event.

        Args:
            news: the member that is new, as ``"text":"..."``.
            usage: counts so far, where the client wants them in every chunk.
        """
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._frame + b',"choices":[{"index":%d,' % index
        tail = self._tail if usage is None else b'}],"usage":' + encode(usage) + b"}\n\n"
        if finish is None:
            return b"".join((head, news, b',"logprobs":', logprobs, b',"finish_reason":null', tail))
        end = b',"finish_reason":%b,"stop_reason":%b' % (encode(finish), encode(stop_reason))
        return b"".join((head, news, b',"logprobs":', logprobs, end, tail))

    def usage(self, body: dict[str, Any]) -> bytes:
        """The last chunk: no choices, the usage."""
        return self._frame + b',"choices":[],"usage":' + encode(body) + b"}\n\n"
