"""Connections, room, errors and reports: rules of the server that are functions of their arguments, each by itself and each
limit from both sides."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import BusyError, ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError
from headway.core.outputs import Logprob
from headway.server import accepting
from headway.server.accepting import OTHER_FILES, TO_REFUSE, Acceptor, room_for_connections
from headway.server.door import take_absolute_form
from headway.server.errors import ApiError, as_api_error, named, shutting_down
from headway.server.launch import _address
from headway.server.lifecycle import Lifecycle, Phase
from headway.server.logs import MAX_CHARS, cut
from headway.server.openapi import STATUSES, complete, operation
from headway.server.protocol import CompletionRequest
from headway.server.report import LOWEST, Usage, chat_logprobs, finite, prompt_logprobs, token_name
from headway.server.sse import Chunks

# -- connections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "wanted", "room"),
    [
        (resource.RLIM_INFINITY, 4096, 4096), (10_000, 4096, 4096), (OTHER_FILES + 4096 + TO_REFUSE, 4096, 4096),
        (OTHER_FILES + 4096 + TO_REFUSE - 1, 4096, 4095), (OTHER_FILES + 8, 4096, 6), (OTHER_FILES + 1, 4096, 1),
        (OTHER_FILES + 1, 1, 1), (OTHER_FILES, 4096, 0), (10, 4096, 0),
    ],
)  # fmt: skip
def test_connections_that_open_files_leave_room_for(
    limit: int, wanted: int, room: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside those of everything else, and some more that are open to be refused: an eighth part of few, 64 of many."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    caplog.set_level(logging.WARNING, "headway")
    if not room:
        with pytest.raises(ConfigError, match=f"may open {limit} files, and the server alone needs {OTHER_FILES}"):
            room_for_connections(wanted)
        return
    assert room_for_connections(wanted) == room
    assert asked == [(limit, limit)] and (f"--max-connections is {room} here" in caplog.text) == (room < wanted)


class Loop:
    """An event loop that does nothing by itself."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.cancelled, self.begun = 0, 0

    def add_reader(self, number: int, call: Callable[[], None]) -> None:
        self.readers[number] = call

    def remove_reader(self, number: int) -> None:
        self.readers.pop(number, None)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.timers.append((seconds, call))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def create_task(self, work: Any) -> Any:
        work.close()
        self.begun += 1
        return self

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        call(self)


def acceptor(monkeypatch: pytest.MonkeyPatch, most: int, found: list[Any]) -> tuple[Acceptor, Loop, list[int]]:
    """One whose listener gives ``found``, and then nothing; what it gives counts as open at once."""
    loop, opened = Loop(), [0]

    def accept() -> tuple[Any, Any]:
        each = found.pop(0) if found else BlockingIOError()
        if isinstance(each, Exception):
            raise each
        opened[0] += 1
        return each, None

    listener: Any = SimpleNamespace(fileno=lambda: 9, accept=accept)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return Acceptor(listener, lambda: None, lambda: opened[0], most), loop, opened  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("most", "taken"), [(3, 4), (9, 12), (1, 2), (192, 256), (4096, 4160)])
def test_some_more_connections_are_taken_to_be_refused(most: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third more of few, 64 of many; then it is looked again a moment later, and when there is room taken on."""
    _, loop, opened = acceptor(monkeypatch, most, ["a connection"] * 5000)
    while not loop.timers:
        before = opened[0]
        loop.readers[9]()
        assert opened[0] - before <= accepting.AT_ONCE, "others have their turn"
    assert opened == [taken] and loop.timers[-1][0] == accepting.LOOK_SECONDS and not loop.readers
    opened[0] -= 2
    loop.timers.pop()[1]()
    loop.readers[9]()
    assert opened == [taken]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_files_nothing_is_taken_for_a_while(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, loop, opened = acceptor(monkeypatch, 99, ["one", OSError(code, "none left"), "two"])
    caplog.set_level(logging.WARNING, "headway")
    loop.readers[9]()
    assert opened == [1] and not loop.readers and [seconds for seconds, _ in loop.timers] == [accepting.PAUSE_SECONDS]
    assert "cannot accept connections (none left)" in caplog.text
    loop.timers.pop()[1]()
    loop.readers[9]()
    assert opened == [2] and loop.begun == 2
    made.close()
    made.close()
    assert not loop.readers and not loop.timers


def test_clients_that_left_before_their_turn_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for gone in (ConnectionAbortedError(), InterruptedError()):
        _, loop, opened = acceptor(monkeypatch, 99, ["one", gone, "two"])
        loop.readers[9]()
        assert opened == [1] and loop.readers and not loop.timers
    _, loop, _ = acceptor(monkeypatch, 99, [OSError(errno.EBADF, "closed")])
    with pytest.raises(OSError, match="closed"):
        loop.readers[9]()


def test_who_closes_while_pausing_does_not_listen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, loop, _ = acceptor(monkeypatch, 99, [OSError(errno.EMFILE, "none")])
    loop.readers[9]()
    made.close()
    assert loop.cancelled == 1
    loop.timers[0][1]()
    assert not loop.readers


def test_clients_whose_machine_is_gone_are_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            accepting._keep_alive(connection)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name, _ in accepting.ALIVE]
    idle, pause, probes = found
    assert idle + pause * probes == 120, "within two minutes"


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        ("http://a.test/v1/models", "/v1/models", b"a.test"), ("HTTPS://a.test:8/x%20y", "/x y", b"a.test:8"),
        ("http://a.test", "/", b"a.test"), ("/http://a.test/", "/http://a.test/", b"own"), ("ftp://a.test/x", None, b"own"),
        ("http:///x", None, b"own"), ("http://me@a.test/x", None, b"own"),
    ],
)  # fmt: skip
def test_targets_with_scheme_and_host(target: str, path: str | None, host: bytes) -> None:
    scope: Any = {"raw_path": target.encode(), "path": target, "headers": [(b"host", b"own"), (b"x", b"y")]}
    take_absolute_form(scope)
    assert scope["path"] == (target if path is None else path)
    assert [value for name, value in scope["headers"] if name == b"host"] == [host] and (b"x", b"y") in scope["headers"]


@pytest.mark.parametrize(
    ("name", "certificate", "address"),
    [(("127.0.0.1", 80), None, "http://127.0.0.1:80"), (("::1", 8000, 0, 0), None, "http://[::1]:8000"),
     (("0.0.0.0", 8443), "x.pem", "https://0.0.0.0:8443")],
)  # fmt: skip
def test_what_to_type_into_a_browser(name: tuple[Any, ...], certificate: str | None, address: str) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: name)
    settings: Any = SimpleNamespace(ssl_certfile=certificate)
    assert _address(listener, settings) == address


# -- room --------------------------------------------------------------------------------------------------------------


def test_places_are_given_up_to_the_last_one() -> None:
    async def run() -> None:
        life = Lifecycle(Phase.READY)
        life.capacity = 5
        life.admit(3)
        life.admit(2)
        with pytest.raises(ApiError) as full:
            life.admit(1)
        assert (full.value.status, full.value.code, full.value.headers) == (429, "queue_full", {"Retry-After": "1"})
        life.release(2)
        life.admit(2)
        life.release(5)
        assert life.num_sequences == 0
        for what, param, fewer in (
            ("completions", "n", "fewer prompts or a smaller n"),
            ("texts", "input", "fewer texts"),
        ):
            life.admit(5, what, param)
            life.release(5)
            with pytest.raises(
                ApiError, match=f"6 {what} in one request can never be admitted: .*send {fewer}$"
            ) as never:
                life.admit(6, what, param)
            assert (never.value.status, never.value.param) == (400, param)

    asyncio.run(run())


def test_idle_is_when_all_have_left() -> None:
    async def run() -> None:
        life = Lifecycle()
        await asyncio.wait_for(life.idle(), 5)
        life.enter()
        life.enter()
        waiting = asyncio.ensure_future(life.idle())
        life.leave()
        await asyncio.sleep(0)
        assert not waiting.done() and life.num_requests == 1
        life.leave()
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "after"),
    [
        (InvalidRequestError("no", "n"), 400, "invalid_request_error", None, None),
        (BusyError("no"), 503, "service_unavailable_error", "busy", "1"),
        (RequestFailedError("no"), 500, "server_error", "request_failed", None),
        (EngineDeadError("its secret reason"), 503, "service_unavailable_error", "engine_dead", "5"),
        (shutting_down(), 503, "service_unavailable_error", "shutting_down", "1"),
        (ApiError(401, "no"), 401, "authentication_error", None, None),
        (ApiError(403, "no"), 403, "permission_error", None, None),
        (ApiError(404, "no"), 404, "not_found_error", None, None), (ApiError(408, "no"), 408, "timeout_error", None, None),
        (ApiError(429, "no"), 429, "rate_limit_error", None, None), (ApiError(504, "no"), 504, "timeout_error", None, None),
        (ApiError(413, "no"), 413, "invalid_request_error", None, None),
        (ApiError(499, "no"), 499, "invalid_request_error", None, None),
    ],
)  # fmt: skip
def test_errors_as_clients_read_them(
    error: Exception, status: int, kind: str, code: str | None, after: str | None
) -> None:
    told = as_api_error(error)
    assert told is not None
    answer, body = told.response(), told.body()["error"]
    assert (answer.status_code, body["type"], body["code"]) == (status, kind, code)
    assert answer.headers.get("retry-after") == after and "secret" not in body["message"]
    assert body["param"] == ("n" if status == 400 else None)


def test_what_was_not_raised_on_purpose_is_told_by_nobody() -> None:
    assert as_api_error(KeyError("x")) is None
    assert "cut this answer short" in str(shutting_down(cut=True)) and "cut" not in str(shutting_down())


@pytest.mark.parametrize(
    ("message", "parameter", "told"),
    [
        ("max_tokens must be at least 1", "max_tokens", "max_completion_tokens must be at least 1"),
        ("it is less than max_tokens", "max_tokens", "it is less than max_completion_tokens"),
        ("prompt is too long for max_tokens", "prompt", "messages is too long for max_completion_tokens"),
        ("a prompt is too long", "prompt", "a prompt is too long"), ("my_max_tokens_too", "max_tokens", "my_max_tokens_too"),
        ("seed is odd", "seed", "seed is odd"), ("top_p is odd", "top_p", "top_p is odd"), ("all is odd", None, "all is odd"),
    ],
)  # fmt: skip
def test_errors_speak_of_fields_as_the_client_does(message: str, parameter: str | None, told: str) -> None:
    names = {"max_tokens": "max_completion_tokens", "prompt": "messages", "seed": "seed"}
    with pytest.raises(InvalidRequestError) as found, named(names):
        raise InvalidRequestError(message, parameter)
    assert (str(found.value), found.value.parameter) == (told, names.get(parameter or "", parameter))


# -- reports -----------------------------------------------------------------------------------------------------------

SPELLED: Any = SimpleNamespace(
    token_text=lambda token: {7: "a", 8: "\ufffd"}.get(token, f"t{token}"),
    token_bytes=lambda token: {7: b"a", 8: b"\xe2\x82"}.get(token, f"t{token}".encode()),
)


def test_alternatives_are_the_best_ones_and_those_asked_for() -> None:
    row = {
        7: Logprob(-0.5, 3, None),
        1: Logprob(-0.1, 1, None),
        2: Logprob(-0.2, 2, None),
        9: Logprob(-math.inf, None, None),
    }
    for top, listed in ((0, ["t9"]), (1, ["t1", "t9"]), (2, ["t1", "t2", "t9"]), (3, ["t1", "t2", "a", "t9"])):
        [entry] = chat_logprobs(SPELLED, [row], top)
        assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -0.5, [97]), "what was drawn comes first"
        assert [each["token"] for each in entry["top_logprobs"]] == listed
    assert entry["top_logprobs"][-1]["logprob"] == LOWEST
    [part] = chat_logprobs(SPELLED, [{8: Logprob(-1.0, 1, None)}], 0)
    assert (part["token"], part["bytes"]) == ("\ufffd", [0xE2, 0x82])


def test_numbers_and_names_that_json_can_hold() -> None:
    assert [finite(value) for value in (-1.5, 0.0, -math.inf, math.inf, math.nan)] == [
        -1.5,
        0.0,
        LOWEST,
        LOWEST,
        LOWEST,
    ]
    assert [token_name(SPELLED, token) for token in (7, 8)] == ["a", "bytes:\\xe2\\x82"]
    rows: Any = [None, {7: Logprob(-math.inf, 4, "a")}]
    assert prompt_logprobs(rows) == [None, {"7": {"logprob": LOWEST, "rank": 4, "decoded_token": "a"}}]
    assert prompt_logprobs(None) is None


def test_tokens_of_several_prompts_are_counted_once_each() -> None:
    def output(prompt: int, cached: int, *completions: int) -> Any:
        parts = [SimpleNamespace(token_ids=[0] * number) for number in completions]
        return SimpleNamespace(prompt_token_ids=[0] * prompt, num_cached_tokens=cached, outputs=parts)

    usage = Usage()
    usage.take(0, output(5, 2, 1, 1))
    usage.take(1, output(7, 0, 3))
    usage.take(0, output(5, 4, 2))
    assert usage.body() == {
        "prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip


@pytest.mark.parametrize(("usage", "tail"), [(True, b'}],"usage":null}\n\n'), (False, b"}]}\n\n")])
def test_chunks(usage: bool, tail: bytes) -> None:
    chunks = Chunks("id", "kind", 7, "m", usage)
    frame = b'data: {"id":"id","object":"kind","created":7,"model":"m"'
    for index in (3, 0, 3):
        head = frame + b',"choices":[{"index":%d,"text":"x","logprobs":' % index
        assert chunks.choice(index, b'"text":"x"') == head + b'null,"finish_reason":null' + tail
        end = b'{},"finish_reason":"stop","stop_reason":5'
        assert chunks.choice(index, b'"text":"x"', logprobs=b"{}", finish="stop", stop_reason=5) == head + end + tail
        counted = chunks.choice(index, b'"text":"x"', usage={"a": 1})
        assert counted == head + b'null,"finish_reason":null}],"usage":{"a":1}}\n\n'
    assert chunks.usage({"a": 1}) == frame + b',"choices":[],"usage":{"a":1}}\n\n'


def test_values_of_log_lines_are_cut() -> None:
    assert cut("x" * MAX_CHARS) == "x" * MAX_CHARS and cut("x" * (MAX_CHARS + 1)) == "x" * MAX_CHARS + "..."
    assert cut(10**300) == 10**300 and cut(None) is None


def test_the_description_says_what_routes_may_answer() -> None:
    bare, whole = operation(), operation(CompletionRequest, streams=True)
    assert {*bare["responses"]} == {200, 401, 403, 404, 414, 500, 503} and bare["openapi_extra"] == {}
    assert {*whole["responses"]} == {200, *STATUSES}
    assert {*whole["responses"][200]["content"]} == {"application/json", "text/event-stream"}
    assert {*bare["responses"][200]["content"]} == {"application/json"}
    assert whole["openapi_extra"]["requestBody"]["required"]
    for keys in (True, False):
        described = complete({"components": {"schemas": {"Own": 1}}}, keys)
        assert {"Own", "Error", "ChatRequest", "EmbeddingRequest"} <= described["components"]["schemas"].keys()
        assert ("security" in described) == ("securitySchemes" in described["components"]) == keys
