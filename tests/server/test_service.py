"""What all routes share: places, how a request ends with its client or its time, several prompts at once, and templates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headway.core.errors import BusyError, EngineDeadError, InvalidRequestError, RequestFailedError
from headway.core.outputs import CompletionOutput, RequestOutput
from headway.server import service as shared
from headway.server import tokens
from headway.server.errors import ApiError
from headway.server.lifecycle import Lifecycle, Phase
from headway.server.service import ClientGoneError, Service, log_error, log_usage, time_limit, until_gone
from headway.server.templates import Templates
from tests.api.fakes import ByteTokenizer
from tests.server.conftest import MakeClient
from tests.server.parrot import SLOTS
from tests.server.test_completions import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def inner(client: TestClient) -> Service:
    found: Service = client.app.state.service  # type: ignore[attr-defined]
    return found


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [0, 3])
def test_as_many_may_wait_as_the_operator_says(make_client: MakeClient, queue: int) -> None:
    client = make_client(max_queue=queue)
    assert inner(client).lifecycle.capacity == SLOTS + queue
    full = {"prompt": "x", "n": SLOTS + queue}
    assert client.post(COMPLETIONS, json=full).status_code == 200
    error = error_of(client.post(COMPLETIONS, json=full | {"n": SLOTS + queue + 1}))
    assert error["param"] == "n" and f"this server holds {SLOTS + queue}" in error["message"]
    assert inner(client).lifecycle.num_sequences == 0


def test_completions_of_one_request_are_counted_over_its_prompts(make_client: MakeClient) -> None:
    client = make_client(max_sequences=6)
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}
    answer = client.post(COMPLETIONS, json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b", "b", "c", "c"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    error = error_of(client.post(COMPLETIONS, json=body | {"prompt": ["a"] * 4}))
    assert "4 prompts times n=2 are 8 completions; one request may ask for 6" in error["message"]


def test_a_place_is_given_back_however_a_request_ends() -> None:
    async def run() -> None:
        life = Lifecycle(Phase.READY)
        life.capacity, woken = 9, list[str]()
        service: Any = SimpleNamespace(
            lifecycle=life, settings=SimpleNamespace(max_sequences=8, max_inputs=5),
            throughput=SimpleNamespace(wake=lambda: woken.append("")),
        )  # fmt: skip
        for room, held in ((Service.room(service, 4, 2), 8), (Service.room_for_texts(service, 5, "input"), 5)):
            with pytest.raises(KeyError), room:
                assert life.num_sequences == held
                raise KeyError
        assert (life.num_sequences, len(woken)) == (0, 2)
        with pytest.raises(ApiError, match="3 prompts times n=3 are 9"), Service.room(service, 3, 3):
            pass
        many = pytest.raises(ApiError, match=r"inputs has 6 texts; one request may have 5 \(--max-inputs\)")
        with many as refused, Service.room_for_texts(service, 6, "inputs"):
            pass
        assert refused.value.param == "inputs" and (life.num_sequences, len(woken)) == (0, 2)

    asyncio.run(run())


def test_names_that_a_model_answers_to(make_client: MakeClient) -> None:
    """Those that were given, the first of which is shown; where none was, the engine's own."""
    check = inner(make_client()).check_model
    assert [check(name) for name in (None, "parrot")] == ["parrot", "parrot"]
    named = inner(make_client(served_model_name=["one", "two"])).check_model
    assert [named(name) for name in (None, "one", "two")] == ["one", "one", "two"]
    for look, unknown in ((check, "other"), (named, "parrot"), (named, "x" * 999)):
        with pytest.raises(ApiError) as refused:
            look(unknown)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found") and len(str(refused.value)) < 400


# -- ends --------------------------------------------------------------------------------------------------------------


class Watch:
    """A connection that tells when its client leaves."""

    def __init__(self, is_there: bool = True) -> None:
        self.is_there, self.call = is_there, None

    def __call__(self, call: Callable[[], None] | None) -> bool:
        self.call = call  # type: ignore[assignment]
        return self.is_there

    @property
    def scope(self) -> Any:
        return {"state": {"headway.when_gone": self}}


async def never(*_: object) -> Any:
    await asyncio.Event().wait()


def test_work_ends_with_its_client() -> None:
    async def run() -> None:
        watch, ended = Watch(), list[str]()

        async def work() -> str:
            try:
                await asyncio.sleep(0)
                assert watch.call is not None
                asyncio.get_running_loop().call_soon(watch.call)
                await never()
            finally:
                ended.append("ended")
            return "done"

        with pytest.raises(ClientGoneError):
            await until_gone(watch.scope, never, work())
        assert ended == ["ended"] and watch.call is None
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0, "whoever waits goes on"

    asyncio.run(run())


def test_work_whose_end_others_want_ends_as_they_want() -> None:
    async def run() -> None:
        watch = Watch()
        task = asyncio.ensure_future(until_gone(watch.scope, never, never()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert watch.call is None
        both = asyncio.ensure_future(until_gone(watch.scope, never, never()))
        await asyncio.sleep(0)
        assert watch.call is not None
        watch.call()
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both

    asyncio.run(run())


def test_work_that_is_done_is_handed_on_and_the_client_forgotten() -> None:
    async def run() -> None:
        async def work() -> str:
            return "done"

        async def failing() -> str:
            raise KeyError("x")

        watch = Watch()
        assert await until_gone(watch.scope, never, work()) == "done" and watch.call is None
        assert await until_gone({"type": "http"}, never, work()) == "done"
        for scope in (watch.scope, {"type": "http"}):
            with pytest.raises(KeyError):
                await until_gone(scope, never, failing())
        begun: list[str] = []

        async def unwanted() -> None:
            begun.append("begun")

        with pytest.raises(ClientGoneError):
            await until_gone(Watch(is_there=False).scope, never, unwanted())
        assert not begun, "the client had left before"

    asyncio.run(run())


def test_without_a_watch_a_disconnect_is_waited_for_beside_the_work() -> None:
    async def run() -> None:
        messages = [{"type": "http.request"}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        with pytest.raises(ClientGoneError):
            await until_gone({"type": "http"}, receive, never())
        assert not messages

    asyncio.run(run())


def test_time_limits() -> None:
    async def run() -> None:
        async with time_limit(0):
            await asyncio.sleep(0)
        async with time_limit(100):
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match=r"longer than 0\.01 seconds \(--request-timeout\)") as late:
            async with time_limit(0.01):
                await never()
        assert (late.value.status, late.value.code) == (504, "timeout")

    asyncio.run(run())


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DRAINING])
def test_what_an_engines_end_is_told_as(phase: Phase) -> None:
    """While the server drains it is the server's own doing."""

    async def run() -> None:
        class Broken(Service):
            def __init__(self) -> None:
                self.lifecycle = Lifecycle(phase)

            async def _generate(self, *_: object) -> Any:
                raise EngineDeadError("gone")
                yield

        outputs = Broken().generate(["x"], None, salt=None, special=True, final=True)  # type: ignore[arg-type]
        if phase is Phase.READY:
            with pytest.raises(EngineDeadError):
                await anext(outputs)
        else:
            with pytest.raises(ApiError, match="has cut this answer short"):
                await anext(outputs)

    asyncio.run(run())


def output(
    text: str = "", *, error: str | None = None, parameter: str | None = None, reason: Any = None
) -> RequestOutput:
    part = CompletionOutput(0, text, [1], finish_reason=reason)
    return RequestOutput("r", None, [1, 2], [part], reason is not None, error=error, error_parameter=parameter)


def test_outputs_that_did_not_end_as_requests_do() -> None:
    for fine in (output(), output(reason="stop"), output(reason="length")):
        shared._check(fine)
    with pytest.raises(InvalidRequestError, match="no") as wrong:
        shared._check(output(error="no", parameter="stop"))
    assert wrong.value.parameter == "stop"
    with pytest.raises(RequestFailedError, match="no"):
        shared._check(output(error="no"))
    with pytest.raises(RequestFailedError, match="aborted by the server's operator"):
        shared._check(output(reason="abort"))


def test_several_prompts_come_as_they_come_and_end_together() -> None:
    async def run() -> None:
        closed: list[int] = []

        async def source(number: int, texts: list[str], fails: bool = False) -> AsyncIterator[RequestOutput]:
            try:
                for text in texts:
                    await asyncio.sleep(0)
                    yield output(text)
                if fails:
                    raise RequestFailedError("broke")
                if number == 9:
                    await never()
            finally:
                closed.append(number)

        found: list[tuple[int, str]] = []
        async for number, each in shared._merged([source(0, ["a", "b"]), source(1, []), source(2, ["c"])]):
            found.append((number, each.outputs[0].text))
        assert sorted(found) == [(0, "a"), (0, "b"), (2, "c")] and sorted(closed) == [0, 1, 2]
        closed.clear()
        with pytest.raises(RequestFailedError, match="broke"):
            async for _ in shared._merged([source(9, ["x"]), source(1, ["y"], fails=True)]):
                pass
        assert sorted(closed) == [1, 9], "the others end with the one that failed"

    asyncio.run(run())


def test_what_a_log_line_says_of_an_answer() -> None:
    fields: dict[str, Any] = {}
    scope: Any = {"headway.log": fields}
    log_usage(scope, 3, 5, "stop")
    assert fields == {"prompt_tokens": 3, "completion_tokens": 5, "finish": "stop"}
    log_error(scope, None)
    assert fields["error"] == "invalid_request"
    log_error(scope, "busy")
    assert fields["error"] == "busy"
    log_usage({}, 1, 1, None)
    log_error({}, None)


# -- templates ---------------------------------------------------------------------------------------------------------


class Told(ByteTokenizer):
    """A tokenizer with a template for tools."""

    def pick_template(self, has_tools: bool = False) -> str | None:
        return "{{ tools }}" if has_tools else self.plain

    plain: str | None = "{{ messages }}"


def test_which_template_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def ask(job: Any) -> Any:
        asked.append(job)
        return SimpleNamespace(text="shown", mark=None)

    async def run() -> None:
        made: Any = Templates(Told(), None, 5.0)  # type: ignore[arg-type]
        monkeypatch.setattr(made, "_ask", ask)
        talk = [{"role": "user", "content": "x"}]
        assert await made.render(talk) == "shown"
        await made.render(
            talk, tools=[{"a": 1}], add_generation_prompt=False, continue_final_message=True, extra={"b": 2}
        )
        await made.render(talk, tools=[], parse_special=True)
        assert [(job.template, job.tools, job.add_generation_prompt, job.continue_final_message) for job in asked] == [
            (0, None, True, False), (1, [{"a": 1}], False, True), (0, [], True, False),
        ]  # fmt: skip
        assert [(job.extra, job.parse_special) for job in asked] == [({}, False), ({"b": 2}, False), ({}, True)]
        for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "parse_special"):
            with pytest.raises(ApiError, match=f"may not set '{name}'"):
                await made.render(talk, extra={name: 1})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokenizer", "override", "tools", "says"),
    [
        (None, "x", None, "--skip-tokenizer-init"), ("bare", None, None, "has no chat template"),
        ("told", "{{ messages }}", [{"a": 1}], "does not show tools"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be_shown(tokenizer: str | None, override: str | None, tools: Any, says: str) -> None:
    class Bare(Told):
        plain = None

    kind: Any = {None: None, "bare": Bare, "told": Told}[tokenizer]
    made = Templates(kind and kind(), override, 5.0)
    with pytest.raises(ApiError, match=says):
        asyncio.run(made.render([{"role": "user", "content": "x"}], tools=tools))


def test_a_template_that_fails_at_the_start_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(job: Any) -> Any:
        raise errors.pop()

    errors: list[Exception] = [BusyError("busy"), ApiError(400, "slow")]
    for said in ("slow", "busy"):
        made: Any = Templates(Told(), None, 5.0)  # type: ignore[arg-type]
        monkeypatch.setattr(made, "_ask", refuse)
        caplog.clear()
        asyncio.run(made.start())
        assert f"fails on one short message: {said}" in caplog.text
    asyncio.run(Templates(None, "x", 5.0).start())  # there is nothing to try


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_as_many_ids_as_may_be_named_or_turned_into_text(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(chat=True)
    monkeypatch.setattr(tokens, "MAX_TOKENS", 5)
    named = {"prompt": "abcd", "return_token_strs": True}
    assert len(client.post("/tokenize", json=named).json()["token_strs"]) == 5
    error = error_of(client.post("/tokenize", json=named | {"prompt": "abcde"}))
    assert error["param"] == "return_token_strs" and "at most 5 tokens, the text has 6" in error["message"]
    assert client.post("/tokenize", json={"prompt": "abcde"}).json()["count"] == 6
    most = inner(client).info.max_model_len
    assert client.post("/detokenize", json={"tokens": [97] * most}).json() == {"prompt": "a" * most}
    assert error_of(client.post("/detokenize", json={"tokens": [97] * (most + 1)}))["param"] == "tokens"
    size = inner(client).info.vocab_size
    assert client.post("/detokenize", json={"tokens": [0, size - 1]}).status_code == 200
    for wrong in (-1, size):
        assert str(wrong) in error_of(client.post("/detokenize", json={"tokens": [97, wrong, 97]}))["message"]


# -- headers -----------------------------------------------------------------------------------------------------------


def test_headers_of_every_answer(make_client: MakeClient) -> None:
    """No browser guesses what an answer is; streams pass proxies at once."""
    client = make_client(chat=True)
    for answer in (client.get("/health"), client.get("/nope"), client.post(COMPLETIONS, json={"prompt": "x"})):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["date"].endswith("GMT") and answer.headers["x-request-id"].startswith("req-")
        assert "connection" not in answer.headers
    stream = client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert client.get("/live/figures").headers["cache-control"] == "no-store"
    inner(client).lifecycle.phase = Phase.DRAINING
    for answer, status in ((client.get("/version"), 200), (client.post(COMPLETIONS, json={"prompt": "x"}), 503)):
        assert (answer.status_code, answer.headers["connection"]) == (status, "close")
    inner(client).lifecycle.phase = Phase.READY


def test_what_pages_of_other_origins_may_send_and_read(make_client: MakeClient) -> None:
    client, page = make_client(allowed_origins=["https://a.example"]), {"Origin": "https://a.example"}
    asked = {
        **page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    assert client.options(COMPLETIONS, headers=asked).status_code == 200
    for wrong in ({"Access-Control-Request-Method": "DELETE"}, {"Access-Control-Request-Headers": "x-other"}):
        assert client.options(COMPLETIONS, headers={**asked, **wrong}).status_code == 400
    shown = client.get("/v1/models", headers=page).headers["access-control-expose-headers"].lower()
    assert {each.strip() for each in shown.split(",")} == {"x-request-id", "retry-after"}


def test_sockets_of_the_web_are_closed() -> None:
    async def run() -> None:
        from headway.server.door import Door
        from headway.server.settings import ServerSettings

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await Door(never, ServerSettings(), Lifecycle(Phase.READY))({"type": "websocket"}, never, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]

    asyncio.run(run())
