"""Starting up: the port answers before the engine stands, and a signal is heard meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from headway import AsyncLLM
from headway.core.errors import ModelError
from headway.server import connection, decode, launch
from headway.server.launch import RARELY, Supervisor, _bind
from headway.server.settings import ServerSettings
from tests.server.parrot import parrot


@pytest.fixture(autouse=True)
def _collections_as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def run(load: Callable[[], AsyncLLM], visit: Callable[[httpx.AsyncClient], Awaitable[None]], **options: Any) -> int:
    """Serve with ``load``'s engine while ``visit`` is a client; the exit status."""

    async def both() -> int:
        settings = ServerSettings(port=0, **options)
        with _bind(settings) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.create_task(Supervisor(load, settings).run(listener))
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                await visit(client)
            return await serving

    return asyncio.run(both())


def test_before_and_after_the_model_is_loaded() -> None:
    may_load = threading.Event()

    def load() -> AsyncLLM:
        assert may_load.wait(60)
        return parrot()

    async def visit(client: httpx.AsyncClient) -> None:
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        alive = await client.get("/live")
        assert (alive.status_code, alive.json()) == (200, {"status": "alive"})
        for path in ("/ready", "/v1/models", "/nope"):
            answer = await client.get(path)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        may_load.set()
        while (await client.get("/ready")).status_code != 200:
            pass
        assert gc.get_freeze_count() > 0 and gc.get_threshold() == RARELY  # no stream waits for the garbage collector
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        answered = (await client.post("/v1/chat/completions", json=chat)).json()
        assert answered["choices"][0]["message"]["content"] == "hi"
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(load, visit) == 0


def test_between_two_engines_is_as_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_RESTART_DELAY", 0.0)
    may_load, made = threading.Event(), list[AsyncLLM]()

    def load() -> AsyncLLM:
        assert not made or may_load.wait(60)
        made.append(parrot(own_process=True))
        return made[-1]

    async def visit(client: httpx.AsyncClient) -> None:
        async def status() -> Any:
            return (await client.get("/health")).json()["status"]

        async def complete() -> httpx.Response:
            return await client.post("/v1/completions", json={"prompt": "x"})

        while await status() != "ready":
            pass
        assert (await complete()).status_code == 200
        engine: Any = made[0]._hub.client
        os.kill(engine.pid, signal.SIGKILL)
        while await status() != "starting":
            pass
        for path in ("/ready", "/v1/models", "/"):
            assert (await client.get(path)).json()["error"]["code"] == "loading"
        answer = await complete()
        assert answer.json()["error"]["code"] == "loading" and answer.headers["retry-after"] == "5"
        may_load.set()
        while await status() != "ready":
            pass
        assert (await complete()).json()["choices"][0]["text"] == "x"
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(load, visit, restart=1) == 0 and len(made) == 2


@pytest.mark.parametrize("case", ["silent", "drips", "drips after a request"])
def test_a_head_that_drips_in_forever_is_cut_off(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        while (await client.get("/ready")).status_code != 200:
            pass
        monkeypatch.setattr(connection, "HEADER_SECONDS", 0.1)
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        if case == "drips after a request":
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b'{"status"' in await reader.readuntil(b"}")
        if case != "silent":
            writer.write(b"GET /health HTTP/1.1\r\n")
        received = None
        while received is None:
            if case != "silent":
                writer.write(b"X-A: b\r\n")
            try:
                async with asyncio.timeout(0.02):
                    received = await reader.read(100)
            except TimeoutError:
                continue
            except ConnectionError:
                received = b""
        assert received == b""
        writer.close()
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(parrot, visit) == 0


def test_a_body_that_never_arrives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "BODY_SECONDS", 0.1)

    async def visit(client: httpx.AsyncClient) -> None:
        while (await client.get("/ready")).status_code != 200:
            pass
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99"
        )
        writer.write(head.encode() + b'\r\n\r\n{"prompt"')
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(parrot, visit) == 0


def test_a_signal_while_loading_ends_it() -> None:
    may_load = threading.Event()

    def load() -> AsyncLLM:
        assert may_load.wait(60)
        raise ModelError("nobody waits for this any more")

    async def visit(client: httpx.AsyncClient) -> None:
        assert (await client.get("/live")).status_code == 200
        os.kill(os.getpid(), signal.SIGINT)

    try:
        assert run(load, visit) == 0
    finally:
        may_load.set()


def test_a_model_that_cannot_be_loaded() -> None:
    def load() -> AsyncLLM:
        raise ModelError("no such model")

    async def visit(client: httpx.AsyncClient) -> None:
        pass

    with pytest.raises(ModelError, match="no such model"):
        run(load, visit)
