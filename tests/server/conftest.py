"""The app over the parrot engine, in this process; and one real server with SmolLM2, shared by all of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headway import AsyncLLM
from headway.server.app import build_app
from headway.server.settings import ServerSettings
from tests.server.live import Live
from tests.server.parrot import parrot


@pytest.fixture(scope="session")
def parrot_llm() -> Iterator[AsyncLLM]:
    llm = parrot()
    yield llm
    llm.shutdown()


MakeClient = Callable[..., TestClient]


@pytest.fixture(scope="module")
def make_client(parrot_llm: AsyncLLM) -> Iterator[MakeClient]:
    """Makes clients of apps with settings of their own; use one at a time, the engine follows one event loop.

    ``chat`` keeps the loop, and the processes that render templates, until the next client is made.
    """
    opened: list[TestClient] = []

    def make(chat: bool = False, **settings: Any) -> TestClient:
        for old in opened:
            old.__exit__(None, None, None)
        opened.clear()
        app = build_app(parrot_llm, ServerSettings(**{"allowed_hosts": ["*"], **settings}))
        client = TestClient(app, raise_server_exceptions=False)
        if chat:
            client.__enter__()
            opened.append(client)
        return client

    yield make
    for old in opened:
        old.__exit__(None, None, None)


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> TestClient:
    return make_client(chat=True)


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Live]:
    """``headway serve`` as users start it, with a template that shows tools."""
    sizes = ["--max-model-len", "256", "--max-num-seqs", "8", "--dtype", "float32", "--device", "cpu"]
    sizes += [
        "--log-stats-interval",
        "1",
        "--kv-cache-memory-bytes",
        "30m",
    ]  # 40 blocks of 16 tokens: three requests of full length
    template = str(Path(__file__).with_name("hermes.jinja"))  # SmolLM2's own shows no tools
    with Live(["-m", "headway", "serve", "smollm2", "--port", "0", "--chat-template", template, *sizes]) as server:
        yield server.wait_ready()
