"""/v1/responses, /tokenize, /detokenize over the parrot engine."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headway.core.errors import RequestFailedError
from headway.core.outputs import CompletionOutput, RequestOutput
from tests.server.test_completions import error_of

PATH = "/v1/responses"


def typed_events(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            parsed = json.loads(data.removeprefix("data: "))
            assert name == f"event: {parsed['type']}"
            found.append(parsed)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response(client: TestClient) -> None:
    answer = client.post(PATH, json={"input": "hello", "metadata": {"a": "b"}}).json()
    assert (answer["status"], answer["object"], answer["store"]) == ("completed", "response", False)
    [message] = answer["output"]
    assert message["content"][0]["text"] == "hello" and message["role"] == "assistant"
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
    assert answer["usage"]["output_tokens"] == 6 and answer["metadata"] == {"a": "b"}


def test_a_response_cut_short(client: TestClient) -> None:
    answer = client.post(PATH, json={"input": "hello", "max_output_tokens": 2}).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert typed_events(client, input="hello", max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_input_items_and_instructions(client: TestClient) -> None:
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "two", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
    ]  # fmt: skip
    answer = client.post(PATH, json={"input": items, "instructions": "be brief"}).json()
    assert answer["output"][0]["content"][0]["text"] == "three"
    shown = "\x06system\x05be brief\x06user\x05one\x06assistant\x05two\x06user\x05three\x06assistant\x05"
    assert answer["usage"]["input_tokens"] == len(shown)


def test_streamed_events_come_in_order(client: TestClient) -> None:
    found = typed_events(client, input="hey")
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in found[4:-4]) == "hey"
    final = found[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == "hey" and final["usage"]["output_tokens"] == 4
    assert found[0]["response"]["id"] == final["id"]
    assert found[2]["item"]["id"] == final["output"][0]["id"]


TIME = {
    "type": "function",
    "name": "time",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "time", "arguments": {"city": "Rome"}}</tool_call>'


def test_a_response_that_calls_a_function(client: TestClient) -> None:
    answer = client.post(PATH, json={"input": f"Well. {CALL}{CALL}", "tools": [TIME]}).json()
    message, first, second = answer["output"]
    assert message["content"][0]["text"] == "Well." and message["status"] == "completed"
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "time", '{"city": "Rome"}')
    assert first["call_id"] != second["call_id"] and first["id"].startswith("fc_")
    assert answer["tools"] == [{**TIME, "description": None, "strict": False}]
    one = client.post(PATH, json={"input": CALL * 2, "tools": [TIME], "parallel_tool_calls": False}).json()
    assert [item["type"] for item in one["output"]] == ["function_call"]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}],
)
def test_a_forced_call_in_a_response(client: TestClient, choice: Any) -> None:
    listed = '[{"name": "time", "parameters": {}}]'
    answer = client.post(PATH, json={"input": listed, "tools": [TIME], "tool_choice": choice}).json()
    [call] = answer["output"]
    assert (call["name"], call["arguments"], answer["tool_choice"]) == ("time", "{}", choice)
    named = {"type": "function", "name": "time"}
    [call] = client.post(PATH, json={"input": '{"city": 1}', "tools": [TIME], "tool_choice": named}).json()["output"]
    assert call["arguments"] == '{"city": 1}'


def test_streamed_calls_in_a_response(client: TestClient) -> None:
    found = typed_events(client, input=f"Hm {CALL}", tools=[TIME])
    kinds = [event["type"].removeprefix("response.") for event in found]
    heads = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert heads == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    written = "".join(e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta")
    done = found[-1]["response"]["output"][1]
    assert written == done["arguments"] == '{"city": "Rome"}'
    places = {e["item_id"]: e["output_index"] for e in found if "item_id" in e}
    assert places == {found[-1]["response"]["output"][i]["id"]: i for i in range(2)}


def test_calls_and_their_outputs_as_input(client: TestClient) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "when?"},
        {
            "type": "function_call",
            "call_id": "1",
            "name": "time",
            "arguments": "{}",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
        {"role": "user", "content": "thanks"},
    ]
    answer = client.post(PATH, json={"input": items, "tools": [TIME]}).json()
    assert answer["output"][0]["content"][0]["text"] == "thanks"
    for place, key in ((1, "name"), (2, "output"), (0, "content")):
        broken = [dict(item) for item in items]
        del broken[place][key]
        assert error_of(client.post(PATH, json={"input": broken}))["param"] == f"input[{place}].{key}"
    assert error_of(client.post(PATH, json={"input": [{**items[0], "name": "x"}]}))["param"] == "input[0].name"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("background", True),
        ("previous_response_id", "resp_1"),
        ("tools", [{"type": "web_search"}]),
        ("include", ["reasoning.encrypted_content"]),
        ("reasoning", {"effort": "low"}),
        ("truncation", "auto"),
        ("n", 2),
        ("input", []),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("text", {"format": {"type": "json_schema"}}),
        ("text", {"verbosity": "low"}),
        ("conversation", "c"),
        ("max_output_tokens", 0),
        ("stream_options", {"include_obfuscation": False}),
    ],
)
def test_what_is_not_served_is_refused(client: TestClient, field: str, value: Any) -> None:
    error = error_of(client.post(PATH, json={"input": "x", field: value}))
    assert str(error["param"]).startswith(field) and "array` of length" not in error["message"]


def test_what_the_client_said_of_streams_and_calls_is_kept(client: TestClient) -> None:
    options = {"include_obfuscation": False}
    last = typed_events(client, input="x", stream_options=options, parallel_tool_calls=False)[-1]
    assert last["response"]["parallel_tool_calls"] is False
    asked = client.post(PATH, json={"input": "x", "stream": True, "stream_options": {"include_obfuscation": True}})
    assert error_of(asked)["param"] == "stream_options.include_obfuscation"


def test_a_prompt_that_is_too_long_or_a_schema_that_is_none(client: TestClient) -> None:
    error = error_of(client.post(PATH, json={"input": "x" * 9000}))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "no such"}}
    assert error_of(client.post(PATH, json={"input": "x", "text": {"format": form}}))["param"] == "text.format"


def test_tokenize_and_detokenize(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "a€", "return_token_strs": True}).json()
    assert answer == {
        "count": 5,
        "max_model_len": 4096,
        "tokens": [1, 97, 0xE2, 0x82, 0xAC],
        "token_strs": ["\x01", "a", "\ufffd", "\ufffd", "\ufffd"],
    }
    bare = client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()
    assert bare["tokens"] == [97] and bare["token_strs"] is None
    assert client.post("/detokenize", json={"tokens": [97, 0xE2, 0x82, 0xAC]}).json() == {"prompt": "a€"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_long_texts_are_read_in_a_thread(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = client.app.state.service.tokenizer  # type: ignore[attr-defined]
    threads: set[str] = set()
    name = tokenizer.token_text

    def named(token: int) -> str:
        threads.add(threading.current_thread().name)
        return str(name(token))

    monkeypatch.setattr(tokenizer, "token_text", named)
    answer = client.post("/tokenize", json={"prompt": "x" * 10_000, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["token_strs"]) == 10_001
    assert all(thread.startswith("headway-tokenising") for thread in threads), (
        "millions of names would stop all streams"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x", "tools": []}),
        ("/tokenize", {"prompt": [1]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [97, 257]}),
        ("/detokenize", {"tokens": [2**40]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
)
def test_bad_texts_and_ids(client: TestClient, path: str, body: dict[str, Any]) -> None:
    error_of(client.post(path, json=body))


def test_a_response_that_fails_midway_says_so_and_is_logged_as_failed(
    client: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status was sent before, and what came until then stays."""

    async def broken(*_: object, **__: object) -> AsyncIterator[tuple[int, RequestOutput]]:
        yield 0, RequestOutput("r", None, [1], [CompletionOutput(0, "fa", [1])], False)
        raise RequestFailedError("broke")

    monkeypatch.setattr(client.app.state.service, "generate", broken)  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, "headway.access"):
        found = typed_events(client, input="x")
    assert [each["type"] for each in found[-2:]] == ["response.output_text.delta", "response.failed"]
    answer = found[-1]["response"]
    assert (answer["status"], answer["error"]) == ("failed", {"code": "server_error", "message": "broke"})
    [item] = answer["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "fa") and answer["incomplete_details"] is None
    [record] = [each for each in caplog.records if each.name == "headway.access"]
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["status"], fields["error"]) == (200, "request_failed")
