"""The server as a process, over the parrot engine in another: what goes wrong around it, and how it comes to an end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import SECONDS, Live, live_parrot
from tests.server.parrot import SLOTS

PATH = "/v1/completions"
ENDLESS = {"prompt": "slow endless", "max_tokens": 4000}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_parrot(log_format="json", max_queue=8, max_connections=1500) as live:
        yield live.wait_ready()


def finished(live: Live, field: str, value: Any, count: int = 1) -> None:
    """Wait for the log lines of ended requests."""
    live.wait_for(f'"{field}":{json.dumps(value)}', count)


def raw(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), SECONDS)


def post_bytes(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def reset(connection: socket.socket) -> None:
    """Close at once, with a reset: what a killed client's kernel does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_free(live: Live) -> bool:
    """Whether every place of the engine can be had: as many requests as there are slots, at the same time."""
    with ThreadPoolExecutor(SLOTS) as pool, live.client() as client:

        def ask(_: int) -> httpx.Response:
            """Until the server has heard of all who left, its queue, or its connections, may still be full."""
            answers = iter(lambda: client.post(PATH, json={"prompt": "hello", "max_tokens": 6}), None)
            return next(answer for answer in answers if answer.status_code not in (429, 503))

        answers = list(pool.map(ask, range(SLOTS)))
    return all(answer.json()["choices"][0]["text"] == "hello" for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: Live, stream: bool) -> None:
    lines = len(server.lines)
    connections = [raw(server) for _ in range(SLOTS)]
    for connection in connections:
        connection.sendall(post_bytes({**ENDLESS, "stream": stream, "user": str(lines)}))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    for connection in connections:
        reset(connection)
    assert is_free(server)
    assert not any('"finish":"length"' in line for line in server.lines[lines:]), "none ran to its end"
    assert sum('"error":"client_gone"' in line for line in server.lines[lines:]) == SLOTS, "whatever the status"
    with server.client() as client:
        assert client.get("/health").status_code == 200


def open_files(live: Live) -> int:
    """Of the server, while one client is connected."""
    with live.client() as client:
        assert client.get("/health").status_code == 200
        return len(os.listdir(f"/proc/{live.process.pid}/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_thousand_connects_and_disconnects(server: Live) -> None:
    assert is_free(server)
    before = open_files(server)
    for number in range(1000):
        connection = raw(server)
        if number % 4 == 1:
            connection.sendall(b"POST /v1/comp")
        elif number % 4 == 2:
            connection.sendall(post_bytes({**ENDLESS, "stream": True}))
        elif number % 4 == 3:
            connection.sendall(post_bytes(ENDLESS)[:-5])
        if number % 2:
            reset(connection)
        else:
            connection.close()
    assert is_free(server)
    assert next(count for count in iter(lambda: open_files(server), None) if count <= before), "none is left open"
    with server.client() as client:
        metrics = client.get("/metrics").text
    assert re.search(r"^headway:num_requests_(running|waiting)\{.*\} 0.0$", metrics, re.MULTILINE)
    assert not re.search(r"^headway:num_requests_(running|waiting)\{.*\} [1-9]", metrics, re.MULTILINE)


def resident_kib(live: Live) -> int:
    """Memory of the server's process that is in use."""
    status = Path(f"/proc/{live.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_returns_to_where_it_was(server: Live) -> None:
    """Rounds of answered, refused and abandoned requests with 100 KB each: what one leaves behind would be 20 MB a round."""
    long = {"prompt": "x" * 100_000, "max_tokens": 2}

    def load() -> int:
        with server.client() as client:
            for number in range(200):
                if number % 4 == 0:
                    with raw(server) as connection:
                        connection.sendall(post_bytes({**ENDLESS, "stream": True, "user": "x" * 100_000}))
                        connection.recv(64)
                elif number % 4 == 1:
                    assert client.post(PATH, json=long).status_code == 400
                else:
                    assert client.post(PATH, json={"prompt": "hi", "user": "x" * 100_000}).status_code in (200, 429)
        assert is_free(server)
        return resident_kib(server)

    rounds = [load() for _ in range(4)]
    assert min(rounds[2:]) - rounds[0] < 15 * 1024, rounds


def test_a_slow_reader_holds_up_nobody(server: Live) -> None:
    with raw(server) as slow:
        slow.sendall(post_bytes({"prompt": "endless", "max_tokens": 4000, "stream": True, "logprobs": 5}))
        assert is_free(server)
        received = b""
        while b"[DONE]" not in received[-200:]:
            received += slow.recv(65536)
    events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in events)
    assert text == "endless" + "x" * 3993, "nothing is lost"
    assert len(events) < 4000, "what waits for the reader is sent together"


def test_the_queue_is_full(server: Live) -> None:
    with contextlib.ExitStack() as stack, server.client() as client:
        for _ in range(SLOTS + 8):
            connection = stack.enter_context(raw(server))
            connection.sendall(post_bytes({**ENDLESS, "stream": True}))
        # The first ones have begun; wait until the last was admitted too: only then is the next one too many.
        answers = iter(lambda: client.post(PATH, json={"prompt": "x", "max_tokens": 1}), None)
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert client.get("/ready").status_code == 200
    assert is_free(server)


def test_a_head_that_is_too_long_or_no_http(server: Live) -> None:
    for junk, status in (
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 80_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A:\r\n" * 300 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"414"),
        (b"\x16\x03\x01junk\r\n\r\n", b"400"),
    ):
        with raw(server) as connection, contextlib.suppress(OSError):
            connection.sendall(junk)
            assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
    assert is_free(server)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_https(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*make, *names], check=True, capture_output=True)
    with live_parrot(ssl_keyfile=key, ssl_certfile=certificate) as live:
        trusted = ssl.create_default_context(cafile=certificate)
        with live.wait_ready().client(verify=trusted) as client:
            assert live.url.startswith("https://")
            with client.stream("POST", PATH, json={"prompt": "hello", "stream": True}) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"


def test_no_check_goes_away_with_assertions() -> None:
    """python -O drops every assert; keys, limits and types must hold without."""
    key = {"Authorization": "Bearer a-long-key"}
    options = {"api_key": ["a-long-key"], "max_body_bytes": 2000, "template_timeout": 1}
    with live_parrot("-O", **options) as live, live.wait_ready().client() as client:
        assert client.get("/v1/models").status_code == 401
        client.headers.update(key)
        assert client.get("/v1/models").status_code == 200
        for body, status in (
            ({"prompt": "x" * 3000}, 413),
            ({"prompt": [300]}, 400),
            ({"prompt": "x", "n": 1000}, 400),
            ({"prompt": "x", "logprobs": 99}, 400),
            ({"prompt": "x", "logit_bias": {"-1": 1}}, 400),
            ({"prompt": "x", "stop": ["a"] * 65}, 400),
            ({"prompt": "x", "cache_salt": ""}, 400),
            ({"prompt": "x", "chat_template": ""}, 400),
            ({"prompt": "x"}, 200),
        ):
            assert client.post(PATH, json=body).status_code == status, body
        for text, status in (("forever", 400), ("hello", 200)):
            talk = {"messages": [{"role": "user", "content": text}]}
            assert client.post("/v1/chat/completions", json=talk).status_code == status


def test_too_many_connections() -> None:
    with live_parrot(max_connections=3) as live, contextlib.ExitStack() as stack:
        live.wait_ready()
        for _ in range(2):
            stack.enter_context(raw(live))
        last = stack.enter_context(live.client())
        assert last.get("/health").status_code == 200, "the last one that may be"
        with live.client() as client:
            answer = client.get("/health")
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "too_many_connections" and "--max-connections" in answer.text
            assert answer.headers["x-request-id"] and answer.headers["connection"] == "close"
            assert client.get("/health").status_code == 503
            live.wait_for("--max-connections")
            assert sum("--max-connections" in line for line in live.lines) == 1, "one line, however many are refused"
            stack.close()
            statuses = iter(lambda: client.get("/health").status_code, 200)
            assert set(statuses) <= {503}, "and it ends"


def test_pipelined_requests_are_answered_in_order(server: Live) -> None:
    with raw(server) as connection:
        connection.sendall(post_bytes({"prompt": "first"}) + post_bytes({"prompt": "second"}))
        received = b""
        while b"second" not in received:
            received += connection.recv(65536)
    assert received.index(b'"first"') < received.index(b'"second"')


def test_lines_of_all_processes_have_one_form(server: Live) -> None:
    awake = json.loads(server.wait_for("the parrot is awake").string)
    assert (awake["level"], awake["message"]) == ("info", "the parrot is awake"), "of the engine's process"
    assert json.loads(server.wait_for("ready on").string)["logger"] == "headway"


def test_the_port_is_taken(server: Live) -> None:
    with live_parrot(port=server.port) as second:
        assert second.wait() != 0
    assert any(f"port {server.port}" in line and "--port" in line for line in second.lines)


def test_a_taken_port_is_one_clean_line_from_the_command(server: Live) -> None:
    with Live(["-m", "headway", "serve", "--port", str(server.port)]) as second:
        assert second.wait() == 2
    [line] = second.lines
    assert line.startswith("headway: cannot listen") and "--port" in line


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with live_parrot() as live, live.wait_ready().client() as client, ThreadPoolExecutor(12) as pool:
        begun = threading.Barrier(SLOTS + 1)
        body = {"prompt": "slow " * 40, "max_tokens": 180}

        def stream() -> str:
            with client.stream("POST", PATH, json={**body, "stream": True}) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                begun.wait(SECONDS)
                return "\n".join([first, *lines])

        def whole() -> httpx.Response:
            return client.post(PATH, json=body)

        streams = [pool.submit(stream) for _ in range(SLOTS)]
        begun.wait(SECONDS)
        live.signal()
        live.wait_for("draining")
        refused = whole()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["connection"] == "close"
        assert client.get("/ready").status_code == 503
        for future in streams:
            text = future.result(SECONDS)
            assert text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text
            assert '"error"' not in text
        assert live.wait() == 0


def test_sigterm_under_load_loses_nothing_that_was_accepted() -> None:
    with live_parrot() as live, live.wait_ready().client() as client, ThreadPoolExecutor(16) as pool:
        body = {"prompt": "slow hello", "max_tokens": 50}

        def ask(_: int) -> str:
            try:
                answer = client.post(PATH, json=body)
            except httpx.TransportError:
                return "refused"  # the port is closed, or the connection was idle when it closed
            if answer.status_code == 503:
                return "refused"
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "slow hello"
            return "answered"

        futures = [pool.submit(ask, i) for i in range(300)]
        live.wait_for("status=200", 20)
        live.signal()
        outcomes = [future.result(SECONDS) for future in futures]
        assert live.wait() == 0
    ended = sum("POST" in line and "status=200" in line for line in live.lines)
    assert outcomes.count("answered") == ended >= 20


def test_a_second_signal_ends_open_requests_with_an_error() -> None:
    with live_parrot(shutdown_timeout=600) as live, live.wait_ready().client() as client:
        with client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.signal(signal.SIGINT)
            live.wait_for("draining")
            live.signal(signal.SIGINT)
            rest = [line for line in lines if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == "shutting_down" and "cut this answer short" in error["message"]
        assert rest[-1] == "data: [DONE]"
        assert live.wait() == 0


def test_the_time_to_drain_ends() -> None:
    with live_parrot(shutdown_timeout=0) as live, live.wait_ready().client() as client:
        with client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.signal()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert live.wait() == 0


def test_a_killed_engine_answers_everybody_and_ends_the_server() -> None:
    with live_parrot() as live, live.wait_ready().client() as client, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(lambda: client.post(PATH, json=ENDLESS))
        with client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(live.engine_pid(), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert rest[-1] == "data: [DONE]"
        failed = whole.result(SECONDS)
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_dead"
        assert live.wait() == 1
    assert any("killed by signal 9" in line for line in live.lines)


def test_an_idle_engine_that_dies_ends_the_server_too() -> None:
    with live_parrot() as live:
        live.wait_ready()
        os.kill(live.engine_pid(), signal.SIGKILL)
        assert live.wait() == 1


def test_restart_brings_a_new_engine() -> None:
    with live_parrot(restart=1) as live, live.wait_ready().client() as client:
        assert client.post(PATH, json={"prompt": "die"}).status_code == 503
        live.wait_for("starting the engine again")
        assert client.get("/ready").status_code == 503, "the port answers meanwhile"
        live.wait_ready(2)
        assert client.post(PATH, json={"prompt": "alive"}).json()["choices"][0]["text"] == "alive"
        assert client.post(PATH, json={"prompt": "die"}).status_code == 503
        assert live.wait() == 1


def test_a_request_may_not_take_longer_than_its_time() -> None:
    with live_parrot(request_timeout=0.3) as live, live.wait_ready().client() as client:
        answer = client.post(PATH, json=ENDLESS)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        with client.stream("POST", PATH, json={**ENDLESS, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert lines[-1] == "data: [DONE]" and len(lines) > 3
        live.wait_for("status=504 .*error=timeout")
        live.wait_for("status=200 .*error=timeout")
        assert is_free(live)
