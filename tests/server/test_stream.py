"""Streams at the ASGI interface, where every send can be held up or fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from headway import AsyncLLM
from headway.core.errors import InvalidRequestError, RequestFailedError
from headway.server.app import build_app
from headway.server.door import LOG_FIELDS
from headway.server.settings import ServerSettings
from headway.server.sse import EventStream
from tests.server.parrot import SLOTS

Message = MutableMapping[str, Any]
PROMPT = "slow " * 20


def scope(path: str = "/v1/completions") -> Message:
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "client": None}


def receiver(body: Message, gone: asyncio.Event) -> Callable[[], Awaitable[Message]]:
    """The body, then silence until the client is gone."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


def texts(messages: list[Message]) -> list[str]:
    lines = b"".join(m.get("body", b"") for m in messages).split(b"\n")
    data = [line[6:] for line in lines if line.startswith(b"data: {")]
    return [json.loads(item)["choices"][0]["text"] for item in data]


def test_what_waits_for_the_client_is_sent_together(parrot_llm: AsyncLLM) -> None:
    """While one write is held up nothing is made for the next; then all of it is one event."""
    messages: list[Message] = []

    async def run() -> None:
        app = build_app(parrot_llm, ServerSettings())

        async def send(message: Message) -> None:
            messages.append(message)
            if len(messages) == 2:
                while parrot_llm._processor.requests():  # until the engine is done with it
                    await asyncio.sleep(0)

        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True}
        await app(scope(), receiver(body, asyncio.Event()), send)

    asyncio.run(run())
    found = texts(messages)
    assert "".join(found) == PROMPT
    assert len(found) <= 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_and_frees_the_place(parrot_llm: AsyncLLM, stream: bool) -> None:
    messages: list[Message] = []

    async def run() -> int:
        app = build_app(parrot_llm, ServerSettings())
        gone = asyncio.Event()
        body = {"prompt": "slow endless", "max_tokens": 4000, "stream": stream, "n": SLOTS}
        started = asyncio.Event()

        async def send(message: Message) -> None:
            messages.append(message)
            started.set()

        request = asyncio.create_task(app(scope(), receiver(body, gone), send))
        if stream:
            await started.wait()
        else:
            while not parrot_llm._processor.requests():
                await asyncio.sleep(0)
        assert app.state.service.lifecycle.num_sequences == SLOTS
        gone.set()
        await request
        assert not parrot_llm._processor.requests()
        while (await parrot_llm.stats()).num_running:
            pass
        return int(app.state.service.lifecycle.num_sequences)

    assert asyncio.run(run()) == 0
    if stream:
        assert messages[0]["status"] == 200 and messages[-1]["more_body"], "it was cut, not finished"
    else:
        assert messages[0]["status"] == 499


def run_stream(events: AsyncGenerator[bytes, None], seconds: float = 0) -> list[Message]:
    messages: list[Message] = []

    async def run() -> None:
        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            messages.append(message)

        await EventStream(events, seconds)({"type": "http"}, receive, send)

    asyncio.run(run())
    return messages


def test_a_failure_in_the_middle_is_an_event_and_the_stream_ends() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise RequestFailedError("broke")

    messages = run_stream(events())
    assert messages[0]["status"] == 200
    last = messages[-1]
    assert not last["more_body"] and last["body"].endswith(b"data: [DONE]\n\n")
    assert json.loads(last["body"].split(b"\n")[0][6:])["error"]["message"] == "broke"


def test_a_failure_before_the_first_event_is_a_status() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise RequestFailedError("broke")
        yield b""

    messages = run_stream(events())
    assert messages[0]["status"] == 500
    assert json.loads(messages[1]["body"])["error"]["message"] == "broke"


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    assert b"request-timeout" in run_stream(events(), 0.01)[-1]["body"]


def test_an_unforeseen_failure_cuts_the_stream() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise KeyError("bug")

    with pytest.raises(KeyError):
        run_stream(events())


@pytest.mark.parametrize(
    ("failure", "logged"), [(InvalidRequestError("no token is left"), "invalid_request"), (ValueError("?"), "internal")]
)
def test_a_stream_that_fails_midway_is_logged_as_failed(failure: Exception, logged: str) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise failure

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_: Message) -> None:
        pass

    fields: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        asyncio.run(EventStream(events(), 0)({"type": "http", LOG_FIELDS: fields}, receive, send))
    assert fields["error"] == logged
