"""What hostile clients have been seen to do, each in seconds. The minutes are in test_siege.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from headway import AsyncLLM
from headway.core.processes import processor_seconds
from headway.server import connection, health, memory
from headway.server.accepting import OTHER_FILES
from headway.server.health import Health
from headway.server.lifecycle import Lifecycle, Phase
from headway.server.logs import MAX_CHARS, Seldom
from tests.server.conftest import MakeClient
from tests.server.live import SECONDS, Live, live_parrot
from tests.server.parrot import parrot
from tests.server.test_launch import run
from tests.server.test_live import PATH, is_free, open_files, post_bytes, raw, resident_kib

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_parrot(max_bodies_bytes=4 * 2**20, max_queue=8) as live:
        yield live.wait_ready()


def status_of(connection: socket.socket) -> bytes:
    """Of the answer on it; b"" where there is none."""
    with contextlib.suppress(OSError):
        return connection.recv(4096)[9:12]
    return b""


# -- bodies ------------------------------------------------------------------------------------------------------------


@LINUX
def test_bodies_that_never_end_share_one_bound(server: Live) -> None:
    """120 of them, each of a megabyte: nobody's memory but 4 MiB, and short requests pass."""
    before = resident_kib(server)
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(120):
            each = stack.enter_context(raw(server))
            held.append(each)
            with contextlib.suppress(OSError):
                each.sendall(HEAD + b"Content-Length: 2000000\r\n\r\n" + b'{"prompt":"' + b"x" * 2**20)
        assert is_free(server)
        ended: list[socket.socket] = []
        while len(ended) < 100:  # told so, or cut off while they were still sending
            ended, _, _ = select.select(held, [], [], SECONDS)
        assert b"503" in map(status_of, ended)
        assert resident_kib(server) - before < 60 * 1024
    with server.client() as client:
        long = {"prompt": "hi", "user": "x" * 3_000_000, "max_tokens": 1}
        answers = iter(lambda: client.post(PATH, json=long).status_code, None)
        assert next(status for status in answers if status != 503) == 200, "the room is there again"


def test_a_body_in_tiny_chunks_is_refused(server: Live) -> None:
    with raw(server) as connection:
        chunks = b"1\r\nx\r\n" * 10_000
        with contextlib.suppress(OSError):
            connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert status_of(connection) == b"400"
    with server.client() as client:
        pieces = (b'{"prompt": "hello"' + b" " * 100, *(b" " * 100 for _ in range(6000)), b"}")
        answer = client.post(PATH, content=iter(pieces), headers={"Content-Type": "application/json"})
        assert answer.json()["choices"][0]["text"] == "hello", "many small ones are fine"


MANY = 2_000_000


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"prompt":"a","stop":[' + '"a",' * MANY + '"a"]}', "stop"),
        ('{"prompt":"a","bad_words":[' + '"a",' * MANY + '"a"]}', "bad_words"),
        ('{"prompt":"a","allowed_token_ids":[' + "1," * MANY + "1]}", "allowed_token_ids"),
        ('{"prompt":"a","stop_token_ids":[' + "1," * MANY + "1]}", "stop_token_ids"),
        ('{"prompt":"a","logit_bias":{"' + "9" * MANY + '":1}}', "logit_bias"),
        ('{"prompt":"a","logit_bias":{' + ",".join(f'"{i}":1' for i in range(2000)) + "}}", "logit_bias"),
        ('{"prompt":"a","max_tokens":' + "9" * MANY + "}", "max_tokens"),
        ('{"prompt":"a","temperature":1e' + "9" * MANY + "}", "temperature"),
        ('{"prompt":"a","' + "k" * MANY + '":1}', "k" * MAX_CHARS),
        ('{"prompt":"a","service_tier":"' + "k" * MANY + '"}', "service_tier"),
        ('{"prompt":"a","model":"' + "k" * MANY + '"}', "model"),
        ('{"prompt":"a","n":256,"logprobs":5,"max_tokens":1000000}', "logprobs"),
        ('{"prompt":"a","n":256,"best_of":256,"logprobs":5,"max_tokens":1000000}', "logprobs"),
        ('{"prompt":[' + '"a",' * MANY + '"a"]}', "n"),
        ('{"prompt":"\\ud800"}', None),
        ('{"prompt":"a","metadata":' + '{"a":' * 5000 + "1" + "}" * 5001, None),
    ],
    ids=range(16),
)
def test_bodies_made_to_cost_much_are_refused_with_a_short_error(
    client: TestClient, body: str, named: str | None
) -> None:
    answer = client.post(PATH, content=body.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404) and len(answer.content) < 2000
    if named is not None:
        assert (answer.json()["error"]["param"] or "")[:20] == named[:20]


def test_log_probabilities_of_one_request_are_bounded(client: TestClient) -> None:
    """256 completions of a whole context with 5 alternatives a token would be gigabytes in a server of longer contexts."""
    from headway.core import params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.api.inputs.MAX_LOGPROBS_OF_A_REQUEST", 10_000)
        answer = client.post(PATH, json={"prompt": "a", "n": 4, "max_tokens": 1000, "logprobs": 5})
        assert answer.status_code == 400 and "24000" in answer.json()["error"]["message"]
        answer = client.post(PATH, json={"prompt": ["a", "b", "c"], "max_tokens": 1000, "logprobs": 5})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs"
        answer = client.post(PATH, json={"prompt": ["a" * 2000] * 3, "prompt_logprobs": 5, "max_tokens": 1})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_logprobs"
        assert client.post(PATH, json={"prompt": "a", "max_tokens": 3000, "logprobs": 5}).status_code == 200
    assert params.MAX_LOGPROBS_OF_A_REQUEST > 131_072 * 21, "what one completion of a long context may ask for"


def test_too_many_ids_to_turn_into_text(client: TestClient) -> None:
    answer = client.post("/detokenize", json={"tokens": [97] * 300_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"
    assert client.post("/detokenize", json={"tokens": [97] * 100_000}).json()["prompt"] == "a" * 100_000


@LINUX
def test_megabytes_of_blanks_cost_next_to_nothing(smollm2: Live) -> None:
    """15 MB cost 21 s and 3 GB, twelve of them held an honest chat up for 53 s."""
    blanks = " " * 15_000_000
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

    def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
        yield PATH, {"prompt": blanks}
        yield PATH, {"prompt": [" x", blanks]}
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": blanks}]}
        yield "/v1/responses", {"input": blanks}

    with smollm2.client() as client:
        assert client.post("/v1/chat/completions", json=talk).status_code == 200
        used, resident = processor_seconds(smollm2.process.pid), resident_kib(smollm2)
        assert used is not None
        for path, body in bodies():
            answer = client.post(path, json=body)
            assert answer.status_code == 400, answer.text[:300]
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        for _ in range(6):
            with raw(smollm2) as connection:
                connection.sendall(post_bytes({"prompt": blanks}))
        assert client.post("/v1/chat/completions", json=talk).status_code == 200
        assert re.search(r"^headway:engine_up\{.*\} 1.0$", client.get("/metrics").text, re.MULTILINE)
        after = processor_seconds(smollm2.process.pid)
        assert after is not None and after - used < 8.0
        assert resident_kib(smollm2) - resident < 300 * 1024


def test_memory_of_large_bodies_is_returned_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(memory, "return_memory", lambda: calls.append(1))

    async def body() -> None:
        returns = memory.Returns()
        for _ in range(10):
            returns.after(memory.LARGE_BYTES)
            returns.after(memory.LARGE_BYTES - 1)
        async with asyncio.timeout(SECONDS):
            while not calls:
                await asyncio.sleep(0)
            returns.after(memory.LARGE_BYTES)
            while len(calls) < 2:
                await asyncio.sleep(0)
        returns.after(memory.LARGE_BYTES - 1)
        assert returns._loop is None

    asyncio.run(body())
    monkeypatch.undo()
    assert memory.return_memory() in (True, False)


# -- connections -------------------------------------------------------------------------------------------------------


@LINUX
def test_open_files_bound_the_connections_and_running_out_of_them_is_one_line() -> None:
    with live_parrot(open_files=OTHER_FILES + 64) as live:
        live.wait_for(r"--max-connections is 48 here, not 4096: .*ulimit -n")
        live.wait_ready()
        assert open_files(live) < OTHER_FILES - 16, "what is set aside is enough"
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(raw(live))
            live.wait_for("ready")
        assert is_free(live)
        used = len(os.listdir(f"/proc/{live.process.pid}/fd"))
        before = resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE, (used + 1, OTHER_FILES + 64))
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(raw(live))
            live.wait_for("cannot accept connections .* trying again every second")
            resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE, before)
        assert is_free(live)
        assert sum("accept" in line for line in live.lines) == 1
        assert len("\n".join(live.lines)) < 50_000


def test_too_few_open_files_are_an_error_that_says_so() -> None:
    with live_parrot(open_files=OTHER_FILES) as live:
        assert live.wait() != 0
    assert any("ulimit -n" in line for line in live.lines)


def test_an_answer_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its place among those that may run or wait, and with enough of them nobody else had one."""
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.2)
    lost, end = asyncio.Event(), connection.Connection.connection_lost

    def connection_lost(self: connection.Connection, error: Exception | None) -> None:
        end(self, error)
        if self.cycle is not None and self.cycle.scope["path"] == PATH:
            lost.set()

    monkeypatch.setattr(connection.Connection, "connection_lost", connection_lost)

    async def visit(client: httpx.AsyncClient) -> None:
        while (await client.get("/ready")).status_code != 200:
            pass
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(30):  # more than the system's buffers take
            writer.write(post_bytes({"prompt": "endless", "max_tokens": 4000, "stream": True, "logprobs": 5, "n": 4}))
        await asyncio.wait_for(lost.wait(), SECONDS)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = 0
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(2**20):
                received += piece.count(b"[DONE]")
        assert received < 30
        writer.close()
        assert (await client.post(PATH, json={"prompt": "hello"})).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)

    assert run(parrot, visit) == 0


def test_hundreds_of_idle_connections_and_pipelined_requests(server: Live) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(raw(server))
        with raw(server) as busy:
            busy.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
            assert is_free(server)
            received = b""
            while received.count(b"HTTP/1.1 200") < 500:
                received += busy.recv(65536)


# -- the log -----------------------------------------------------------------------------------------------------------


def test_log_lines_are_short_and_probes_have_none(server: Live) -> None:
    lines = len(server.lines)
    with server.client() as client:
        for path in ("/live", "/live/figures", "/health", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/nope" + "é" * 1000).status_code == 404
        assert client.request("X" * 5000, "/version").status_code == 405
    for _ in range(50):
        with raw(server) as connection:
            connection.sendall(b"\x16\x03\x01junk\r\n\r\n")
            assert status_of(connection) == b"400"
    assert is_free(server)
    new = server.lines[lines:]
    assert not any("/live" in line or "/health" in line or "/metrics" in line for line in new)
    assert sum("no valid HTTP" in line for line in new) <= 1
    assert max(map(len, new)) < 2500 and any("/nope" in line for line in new)


def test_a_warning_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    seldom = Seldom(clock=lambda: now[0])
    for _ in range(1000):
        seldom.warn("so it goes")
    now[0] = 60.0
    seldom.warn("so it goes")
    assert [r.getMessage() for r in caplog.records] == [
        "so it goes",
        "so it goes (1000 times since the last such line)",
    ]


# -- an engine that stands still ---------------------------------------------------------------------------------------


def test_what_counts_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own; the question to the engine stays open for ever."""
    monkeypatch.setattr(health, "TICK_SECONDS", 0.0)
    now, used, said = [100.0], [1.0], [100.0]

    def judge(works: bool) -> tuple[Health, SimpleNamespace]:
        def life() -> tuple[float, float]:
            now[0] += 0.25
            used[0] += 0.1 if works else 0.0
            return said[0], used[0]

        llm: Any = SimpleNamespace(dead_error=None, signs_of_life=life)
        source: Any = SimpleNamespace(asked_at=now[0], ask=lambda: asyncio.ensure_future(asyncio.Event().wait()))
        return Health(llm, Lifecycle(Phase.READY), source, lambda: now[0]), llm

    async def body() -> None:
        stopped, llm = judge(works=False)
        begun = now[0]
        assert await stopped.state() == "silent"
        assert health.SILENT_SECONDS < now[0] - begun < health.SILENT_SECONDS + 2
        begun = now[0]
        assert await stopped.state() == "silent" and now[0] - begun < 2, "known already"
        said[0] = now[0]
        llm.dead_error = "dead"
        assert await stopped.state() == "dead"
        working, _ = judge(works=True)
        said[0] = now[0]
        assert await working.state() == "ready"
        now[0] += health.LONG_STEP_SECONDS
        assert await working.state() == "silent", "however hard it works"
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(body())


@LINUX
@pytest.mark.slow
def test_a_stopped_engine_is_seen_and_a_continued_one_too() -> None:
    with live_parrot() as live, live.wait_ready().client() as client:
        assert client.get("/health").json() == {"status": "ready"}
        os.kill(live.engine_pid(), signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, PATH, json={"prompt": "hello"})
            for path in ("/health", "/ready"):
                answer = client.get(path)
                assert (answer.status_code, answer.json()) == (503, {"status": "silent"})
            assert client.get("/live").status_code == 200
            assert re.search(r"^headway:engine_up\{.*\} 0.0$", client.get("/metrics").text, re.MULTILINE)
            os.kill(live.engine_pid(), signal.SIGCONT)
            assert waiting.result(SECONDS).json()["choices"][0]["text"] == "hello"
        assert client.get("/health").status_code == 200


# -- templates ---------------------------------------------------------------------------------------------------------


@LINUX
def test_a_template_process_that_is_killed_costs_nobody(make_client: MakeClient) -> None:
    client = make_client(chat=True)
    pool, _ = client.app.state.service.templates._open  # type: ignore[attr-defined]
    talk = {"messages": [{"role": "user", "content": "hello"}]}

    def killed_once(data: bytes) -> Any:
        [child, *_] = pool._idle
        os.kill(child.process.pid, signal.SIGKILL)
        return client.post("/v1/chat/completions", json=talk)

    assert client.post("/v1/chat/completions", json=talk).status_code == 200
    assert killed_once(b"").json()["choices"][0]["message"]["content"] == "hello"


def test_what_could_not_be_done_now_is_a_503(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.core.errors import BusyError

    client = make_client(chat=True)

    def busy(*_: Any, **__: Any) -> bytes:
        raise BusyError("not now")

    service = client.app.state.service  # type: ignore[attr-defined]
    monkeypatch.setattr(service.templates._open[0], "run", busy)
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]})
    assert answer.status_code == 503 and answer.headers["retry-after"] and answer.json()["error"]["code"] == "busy"


# -- what is told --------------------------------------------------------------------------------------------------


def test_no_folder_is_shown(parrot_llm: AsyncLLM, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parrot_llm.model_info, "model", "/srv/secret/models/Parrot-1B")
    client = make_client(chat=True)
    for path in ("/v1/models", "/v1/models/Parrot-1B", "/live/figures", "/metrics", "/openapi.json", "/"):
        answer = client.get(path)
        assert answer.status_code == 200 and "secret" not in answer.text, path
    assert client.get("/v1/models").json()["data"][0]["id"] == "Parrot-1B"
    for name in ("Parrot-1B", "/srv/secret/models/Parrot-1B"):
        answer = client.post(PATH, json={"model": name, "prompt": "hello"})
        assert answer.json()["model"] == "Parrot-1B" and "secret" not in answer.text
    assert "secret" not in client.post(PATH, json={"model": "other", "prompt": "x"}).text


def test_embeddings_are_told_where_to_go(client: TestClient) -> None:
    answer = client.post("/v1/embeddings", json={"input": "hello", "model": "parrot"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and "/v1/chat/completions" in error["message"] and error["param"] == "model"


def test_the_log_says_what_is_loaded_and_where_to_look() -> None:
    with live_parrot() as live:
        live.wait_for(r"loading .*; listening on http://127\.0\.0\.1:\d+")
        live.wait_for(r"ready on http://127\.0\.0\.1:\d+ .*page.* /")
