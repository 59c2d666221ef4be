"""A small OpenAI-like server that says what a test wants, byte by byte.

``python -m tests.cli.fake_server PORT`` runs one that gives every request the tokens it asks for, until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def completion(num_chunks: int, *, tokens_per_chunk: int = 1, usage: bool = True, prompt: int = 7) -> list[bytes]:
    """Events of one streamed completion."""
    parts = [event({"choices": [{"index": 0, "text": "x" * tokens_per_chunk, "finish_reason": None}]})] * num_chunks
    if usage:
        counts = {"prompt_tokens": prompt, "completion_tokens": num_chunks * tokens_per_chunk}
        parts = [*parts, event({"choices": [], "usage": counts})]
    return [*parts, event(b"[DONE]")]


@dataclass
class Answer:
    """What to send back.

    Attributes:
        parts: of the body, each a chunk when ``framing`` is "chunked" ("length" and "close" are the other two).
        cut: bytes of the whole answer after which the connection is dropped.
        borders: seed of the pieces in which the bytes are written; None: all at once.
        holds: the last byte never comes.
    """

    parts: list[bytes] = field(default_factory=lambda: completion(3))
    status: int = 200
    framing: str = "chunked"
    cut: int | None = None
    borders: int | None = None
    holds: bool = False

    def raw(self) -> bytes:
        head = f"HTTP/1.1 {self.status} Fine\r\nContent-Type: text/event-stream\r\n"
        body = b"".join(self.parts)
        if self.framing == "chunked":
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in self.parts if part)
            return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"
        if self.framing == "length":
            return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        return f"{head}Connection: close\r\n\r\n".encode() + body


class FakeServer:
    """Requests seen, in order, and where to reach it."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer], hang_up: bool) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_connections = 0
        self.port = 0
        self._answer, self._hang_up = answer, hang_up

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if head[0].startswith("GET"):  # /v1/models, and whatever is asked of its health
            listed = json.dumps({"data": [{"id": "fake-model"}]}).encode()
            writer.write(Answer([listed], framing="length").raw())
            return True
        request = {"path": head[0].split(" ")[1], **json.loads(body)}
        self.requests.append(request)
        self.headers.append(headers)
        answer = self._answer(request)
        raw = answer.raw()[: -1 if answer.holds else answer.cut]
        rng = random.Random(answer.borders)
        while raw and answer.borders is not None:
            size = rng.choice((1, 2, 3, 7, 30))
            writer.write(raw[:size])
            raw = raw[size:]
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(raw)
        await writer.drain()
        if answer.holds:
            await reader.read()  # until the client leaves
        return answer.cut is None and answer.framing != "close" and not self._hang_up


@contextmanager
def serving(
    answer: Callable[[dict[str, Any]], Answer] | None = None, *, hang_up: bool = False, port: int = 0
) -> Iterator[FakeServer]:
    """A running server, in a thread of its own. ``hang_up`` closes each connection after one answer, without saying so."""
    server = FakeServer(answer or (lambda request: Answer()), hang_up)
    started, loop = threading.Event(), asyncio.new_event_loop()

    async def main() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=1024)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            listener.close()

    def drive() -> None:
        task = loop.create_task(main())
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(goodbye())
        loop.close()

    async def goodbye() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for left in rest:
            left.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # transports close a turn later

    stop: list[Callable[[], Any]] = []
    thread = threading.Thread(target=drive)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        stop[0]()
        thread.join()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with serving(lambda request: Answer(completion(request["max_tokens"])), port=int(sys.argv[1])):
        signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main()
