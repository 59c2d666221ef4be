"""Minutes of hostile clients beside an honest one: ``make attack``. Everything stays on the loopback and is bounded in number.

The honest client asks for one short chat after the other. What is asserted is that each is answered, that what it used of
the server's processor stays within a bound, and that memory and connections return; its longest wait is printed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from headway.core.processes import processor_seconds
from tests.server.live import SECONDS, Live
from tests.server.test_live import PATH, open_files, post_bytes, raw, resident_kib

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
CHAT = "/v1/chat/completions"
TALK = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "temperature": 0}
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    sizes = ["--max-model-len", "2048", "--max-num-seqs", "8", "--device", "cpu", "--max-connections", "400"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.server.live.SECONDS", 300.0)  # the machine may be busy with other things, too
        with Live(["-m", "headway", "serve", "smollm2", "--port", "0", *sizes]) as live:
            yield live.wait_ready()


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


class Honest(threading.Thread):
    """Chats until it is told to stop."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live, self.stop = live, threading.Event()
        self.waits: list[float] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            begun = monotonic()
            try:
                with self.live.client() as client:
                    answer = client.post(CHAT, json=TALK)
                if answer.status_code != 200:
                    self.wrong.append(f"{answer.status_code} {answer.text[:200]}")
            except Exception as error:
                self.wrong.append(repr(error))
            self.waits.append(monotonic() - begun)


def send(live: Live, data: bytes, hold: contextlib.ExitStack | None = None) -> socket.socket | None:
    """Send, and stay connected with ``hold``, else leave at once; the system still delivers all of it."""
    try:
        connection = raw(live)
    except OSError:
        return None
    connection.settimeout(20.0)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    if hold is None:
        connection.close()
    else:
        hold.enter_context(connection)
    return connection


def blanks(live: Live, hold: contextlib.ExitStack) -> None:
    """Long texts whose beginnings fit, asked for and left."""
    for text in (" " * 15_000_000, "a" * 15_000_000, "字" * 4_000_000, "x" + "\n" * 15_000_000):
        for path, body in (
            (PATH, {"prompt": text}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            ("/v1/responses", {"input": text}),
            ("/tokenize", {"prompt": text}),
        ):
            send(live, request(path, body))


def texts_that_pass(live: Live, hold: contextlib.ExitStack) -> None:
    """Below every bound on length, so that they are tokenised."""
    for _ in range(60):
        send(live, request(PATH, {"prompt": " " * 150_000}))
        send(live, request("/tokenize", {"prompt": "ab " * 80_000}))


def unfinished_bodies(live: Live, hold: contextlib.ExitStack) -> None:
    for _ in range(120):
        head = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        send(live, head + b"Content-Length: 15000001\r\n\r\n" + b"x" * 15_000_000, hold)


def half_open(live: Live, hold: contextlib.ExitStack) -> None:
    """Nothing, half a head, idle after an answer, pipelined."""
    for number in range(300):
        send(live, (b"", b"GET / HT", b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)[number % 3], hold)


def heads(live: Live, hold: contextlib.ExitStack) -> None:
    for _ in range(200):
        send(live, b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + b"A:\r\n" * 15_000 + b"\r\n")
        send(live, b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        send(live, b"\x00\xff" * 1000)


def chunks(live: Live, hold: contextlib.ExitStack) -> None:
    head = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(20):
        send(live, head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200_000)


def unread_streams(live: Live, hold: contextlib.ExitStack) -> None:
    body = {"prompt": "Once", "max_tokens": 1500, "stream": True, "ignore_eos": True, "logprobs": 5}
    for _ in range(8):
        send(live, post_bytes(body), hold)


def abandoned_streams(live: Live, hold: contextlib.ExitStack) -> None:
    for number in range(300):
        body = {"prompt": "Once", "max_tokens": 1500, "stream": bool(number % 2), "ignore_eos": True}
        send(live, post_bytes(body))


def grammars(live: Live, hold: contextlib.ExitStack) -> None:
    """Bombs, deep and wide schemas; most are left at once."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(12):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}, "required": ["a"]}
    for number in range(12):
        for wanted in (
            {"regex": f"(?:[ab]*a){{9}}(?:[ab]{{0,9}}b){{{300 + number}}}"},
            {"json": deep},
            {"json": {"enum": [f"{number}-{i}" * 5 for i in range(3000)]}},
        ):
            send(live, request(PATH, {"prompt": "x", "structured_outputs": wanted, "max_tokens": 4}))


def costly_fields(live: Live, hold: contextlib.ExitStack) -> None:
    for field, item in (("stop", '"a",'), ("bad_words", '"a",'), ("allowed_token_ids", "1,"), ("stop_token_ids", "1,")):
        body = f'{{"prompt":"a","{field}":[{item * (15_000_000 // len(item))}{item[:-1]}]}}'.encode()
        head = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(3):
            send(live, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    words = ["a" + " " * 1000 + str(i) for i in range(256)]
    for _ in range(20):
        send(live, request(PATH, {"prompt": "x", "bad_words": words}))


ATTACKS: list[tuple[Callable[[Live, contextlib.ExitStack], None], float, int]] = [
    (blanks, 60.0, 1024),
    (texts_that_pass, 60.0, 600),
    (unfinished_bodies, 60.0, 500),
    (half_open, 30.0, 200),
    (heads, 60.0, 200),
    (chunks, 60.0, 200),
    (unread_streams, 120.0, 300),
    (abandoned_streams, 60.0, 300),
    (grammars, 60.0, 300),
    (costly_fields, 90.0, 1200),
]
"""The attack, processor seconds that the server's own process may use on it and on what the honest client asks, and MiB."""


@pytest.mark.parametrize(("attack", "seconds", "mebibytes"), ATTACKS, ids=[each[0].__name__ for each in ATTACKS])
def test_an_honest_client_is_answered(
    server: Live,
    attack: Callable[[Live, contextlib.ExitStack], None],
    seconds: float,
    mebibytes: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pid = server.process.pid
    with server.client() as client:
        assert client.post(CHAT, json=TALK).status_code == 200
        begun = monotonic()
        assert client.post(CHAT, json=TALK).status_code == 200
        alone = monotonic() - begun
    used, resident, files = processor_seconds(pid), resident_kib(server), open_files(server)
    honest = Honest(server)
    honest.start()
    most = resident
    try:
        with contextlib.ExitStack() as hold:
            attack(server, hold)
            until = monotonic() + 5.0
            while monotonic() < until:  # beside what it has left behind
                most = max(most, resident_kib(server))
                honest.stop.wait(0.05)
    finally:
        honest.stop.set()
        honest.join(SECONDS)
    after = processor_seconds(pid)
    assert used is not None and after is not None
    with capsys.disabled():
        print(
            f"\n{attack.__name__}: {len(honest.waits)} chats, the longest took {max(honest.waits):.1f} s, alone {alone:.1f} s; "
            f"{after - used:.1f} s of processor; {(most - resident) // 1024} MiB more, "
            f"{(resident_kib(server) - resident) // 1024} MiB stayed"
        )
    assert honest.waits and not honest.wrong, honest.wrong[:3]
    assert after - used < seconds
    assert (most - resident) // 1024 < mebibytes
    with server.client() as client:
        assert client.get("/health").status_code == 200
    counts = iter(lambda: open_files(server), None)
    assert next(count for count in counts if count <= files + 20), "connections are closed"
    assert sum(map(len, server.lines)) < 3_000_000, "the log stays readable"
