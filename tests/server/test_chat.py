"""/v1/chat/completions over the parrot engine, which answers with the last user message."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server.children import children
from tests.server.conftest import MakeClient
from tests.server.test_completions import error_of, events

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def permit(mode: str, *names: str) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


def said(text: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **body}


def ask(client: TestClient, text: str, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json=said(text, **body))
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def test_an_answer(client: TestClient) -> None:
    answer = ask(client, "hello, I have no limit of sixteen")
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hello, I have no limit of sixteen",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stream_has_the_role_first_and_the_reason_last(client: TestClient) -> None:
    stream = events(client, PATH, **said("añb", n=2, stream_options={"include_usage": True}))
    assert stream.pop()["choices"] == []
    for index in range(2):
        choices = [c for e in stream for c in e["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert "".join(c["delta"].get("content", "") for c in choices) == "añb"
    assert all(e["object"] == "chat.completion.chunk" for e in stream)


def test_logprobs(client: TestClient) -> None:
    [choice] = ask(client, "b€", logprobs=True, top_logprobs=2, max_tokens=2)["choices"]
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("b", [98])
    assert [t["token"] for t in first["top_logprobs"]] == ["a"], "rank 3 is not among the top two"
    assert (second["token"], second["bytes"]) == ("\ufffd", [0xE2]), "a part of a character has exact bytes"
    stream = events(client, PATH, **said("b€", logprobs=True, max_tokens=2))
    streamed = [t for e in stream for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
    assert [t["bytes"] for t in streamed] == [[98], [0xE2]] and streamed[0]["top_logprobs"] == []


def test_either_name_of_the_limit(client: TestClient) -> None:
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        [choice] = ask(client, "abcdef", **limit)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")
    error_of(client.post(PATH, json=said("x", max_tokens=3, max_completion_tokens=4)))


def test_roles_and_parts_as_the_template_sees_them(client: TestClient) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "\x06system\x05be brief\x06user\x05one\ntwo\x06assistant\x05"


def test_a_message_to_be_continued(client: TestClient) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    tokens = client.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert bytes(tokens).endswith(b"\x06assistant\x05It is")
    answer = client.post(PATH, json={"messages": messages, "continue_final_message": True})
    assert answer.status_code == 200
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert error_of(client.post(PATH, json=both))["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        (said("refuse"), "messages"),
        (said("x", chat_template="{{ 1 }}"), "chat_template"),
        (said("x", chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        (said("x", chat_template_kwargs={"self": 1}), "chat_template_kwargs"),
        (said("x", top_logprobs=2), "top_logprobs"),
        (said("x", tool_choice="required"), "tool_choice"),
        (said("x", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "no"}}), "tool_choice"),
        (said("x", tools=[WEATHER, WEATHER]), "tools"),
        (said("x", tools=[WEATHER], structured_outputs={"regex": "x"}), "structured_outputs"),
        (said("x", tools=[WEATHER], tool_choice="required", structured_outputs={"regex": "x"}), "structured_outputs"),
        (said("x", tools=[WEATHER], tool_choice=permit("auto")), "tool_choice"),
        (said("x", tools=[WEATHER], tool_choice=permit("auto", "no")), "tool_choice"),
        (said("x", functions=[]), "functions"),
        (said("x", modalities=["audio"]), "modalities"),
        (said("x", stream=True, stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation"),
        (said("x", audio={}), "audio"),
        (said("x", reasoning_effort="low"), "reasoning_effort"),
        (said("x", response_format={"type": "json_schema"}), "response_format.json_schema"),
        (said("x", response_format={"type": "xml"}), "response_format.type"),
        (said("x", structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
        (said("x", stream=True, prompt_logprobs=1), "prompt_logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: TestClient, body: dict[str, Any], param: str) -> None:
    assert str(error_of(client.post(PATH, json=body))["param"]).startswith(param)


BAD_SCHEMA = {"type": "no such"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (said("x", max_tokens=0), "max_tokens"),
        (said("x", max_completion_tokens=0), "max_completion_tokens"),
        (said("x", logprobs=True, top_logprobs=9), "top_logprobs"),
        (said("x" * 9000), "messages"),
        (said("x", structured_outputs={"json": BAD_SCHEMA}), "structured_outputs"),
        (
            said("x", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": BAD_SCHEMA}}),
            "response_format",
        ),
        (
            said("x", tools=[{"function": {"name": "f", "parameters": BAD_SCHEMA}}], tool_choice="required"),
            "tools",
        ),
    ],
)
def test_an_error_names_the_field_as_the_client_does(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = error_of(client.post(PATH, json=body))
    assert error["param"] == param
    assert param in error["message"] or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, ["'robot'", "system, developer, user, assistant, tool"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            ["image_url.url is missing"],
        ),
        (said("x", tool_choice="maybe"), ["'maybe'", "none, auto, required"]),
        (said("x", service_tier="flex"), ["auto, default"]),
        (said("x", response_format={"type": "xml"}), ["text, json_object, json_schema"]),
        (said("x", prompt_cache_retention="24h"), ["not promised"]),
    ],
)
def test_an_error_says_what_would_be_right(client: TestClient, body: dict[str, Any], words: list[str]) -> None:
    message = error_of(client.post(PATH, json=body))["message"]
    assert all(word in message for word in words), message


def test_a_tool_call(client: TestClient) -> None:
    [choice] = ask(client, f"Let me see. {CALL}", tools=[WEATHER])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


def test_streamed_tool_calls(client: TestClient) -> None:
    stream = events(client, PATH, **said(f"Well {CALL}{CALL}", tools=[WEATHER]))
    choices = [c for e in stream for c in e["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Well"
    deltas = [call for c in choices for call in c["delta"].get("tool_calls", [])]
    heads = [delta for delta in deltas if "id" in delta]
    assert [head["index"] for head in heads] == [0, 1] and len({head["id"] for head in heads}) == 2
    assert all(head["function"] == {"name": "weather", "arguments": ""} for head in heads)
    for index in (0, 1):
        written = "".join(delta["function"]["arguments"] for delta in deltas if delta["index"] == index)
        assert written == '{"city": "Rome"}'
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_the_arguments_of_a_call_that_is_cut_off_stay(client: TestClient) -> None:
    """What has been streamed cannot be taken back, so a whole answer says the same."""
    [choice] = ask(client, CALL, tools=[WEATHER], max_tokens=CALL.index("Ro") + 2)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'


def test_one_call_where_more_are_not_wanted(client: TestClient) -> None:
    [choice] = ask(client, CALL + CALL, tools=[WEATHER], parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["message"]["content"] is None


def test_tools_that_may_not_be_called_are_not_shown(client: TestClient) -> None:
    [choice] = ask(client, CALL, tools=[WEATHER], tool_choice="none")["choices"]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_conversation_with_calls_and_results(client: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert client.post(PATH, json={"messages": messages, "tools": [WEATHER]}).status_code == 200
    call["function"] = {"name": "weather", "arguments": "[1]"}
    assert error_of(client.post(PATH, json={"messages": messages}))["param"] == "messages[1].tool_calls[0]"


def test_only_allowed_tools_are_called(client: TestClient) -> None:
    other = {"type": "function", "function": {"name": "time"}}
    both = CALL + CALL.replace("weather", "time")
    [choice] = ask(client, both, tools=[WEATHER, other], tool_choice=permit("auto", "time"))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
    assert choice["message"]["content"] == CALL
    listed = '[{"name": "time", "parameters": {}}]'
    [choice] = ask(client, listed, tools=[WEATHER, other], tool_choice=permit("required", "time"))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


def test_tools_beside_a_form_for_the_answer(client: TestClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    listed = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
    [choice] = ask(client, listed, tools=[WEATHER], response_format=form)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    answer = '{"name": "weather", "parameters": {}}'
    for wanted in (form, {"type": "json_object"}):
        [choice] = ask(client, answer, tools=[WEATHER], response_format=wanted)["choices"]
        assert choice["message"]["content"] == answer and "tool_calls" not in choice["message"]
    many = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "null"}}}}
    assert (
        error_of(client.post(PATH, json=said("x", tools=[WEATHER], response_format=many)))["param"] == "response_format"
    )


def test_a_model_whose_template_knows_no_tools(make_client: MakeClient, tmp_path: Path) -> None:
    """It is told of them in the first message, and of earlier calls as text."""
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}\x06{{ m.role }}\x05{{ m.content }}{% endfor %}\x06assistant\x05")
    client = make_client(chat=True, chat_template=str(template))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": CALL},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    [choice] = client.post(PATH, json=body).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    shown = bytes(tokens).decode()
    told, asked = shown.split("\n\nBe brief.")
    assert told.startswith("\x06system\x05You can call") and '{"name":"weather","description":"of a city"' in told
    assert '"arguments":{"city":"Rome"}' in asked and "\x06user\x05<tool_response>\nsunny\n</tool_response>" in asked
    forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    [choice] = client.post(PATH, json={**said('{"city": "Rome"}', tools=[WEATHER]), **forced}).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_strict_tools_need_a_forced_call(client: TestClient) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    assert "strict" in error_of(client.post(PATH, json=said("x", tools=[strict])))["message"]


def test_a_template_that_takes_forever_costs_only_its_request(make_client: MakeClient) -> None:
    client = make_client(chat=True, template_timeout=0.5)
    assert "longer than" in error_of(client.post(PATH, json=said("forever")))["message"]
    assert error_of(client.post(PATH, json=said("too much")))["param"] == "messages"
    assert ask(client, "still here")["choices"][0]["message"]["content"] == "still here"


def test_no_process_outlives_its_app(make_client: MakeClient) -> None:
    """Those that render templates are children of the server, which may go on without the app."""
    renders = "headway.server.render_child"
    make_client()
    before = children(renders)
    with make_client() as client:
        ask(client, "x", max_tokens=1)
        own = children(renders).keys() - before.keys()
        assert own
        handles = [os.pidfd_open(pid) for pid in own]
    for handle in handles:
        assert select.select([handle], [], [], 30)[0], "processes are left"
        os.close(handle)
