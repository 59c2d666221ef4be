"""Structured output and forced tool calls with SmolLM2, through the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.live import Live

ASK: list[Any] = [{"role": "user", "content": "Describe a cat as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "legs": {"enum": [2, 4]}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {field: {"$ref": "#/$defs/word"}},
                "required": [field],
                "additionalProperties": False,
                "$defs": {"word": {"enum": words}},
            },
        },
    }
    for name, field, words in (("weather", "city", ["Rome", "Oslo"]), ("time", "zone", ["UTC"]))
]
WORDS = {"city": ["Rome", "Oslo"], "zone": ["UTC"]}


@pytest.fixture(scope="module")
def client(smollm2: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{smollm2.url}/v1", api_key="unused", max_retries=0, timeout=120) as opened:
        yield opened


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="smollm2", messages=ASK, max_completion_tokens=120, **options)


def test_a_schema(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=wanted, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert set(value) == {"name", "legs"} and value["legs"] in (2, 4) and len(value["name"]) <= 8


class Cat(BaseModel):
    legs: Literal[2, 4]
    colour: Literal["black", "white"]


def test_the_clients_own_parser(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=ASK, response_format=Cat, max_completion_tokens=120
    )
    assert isinstance(answer.choices[0].message.parsed, Cat)
    response = client.responses.parse(model="smollm2", input="A cat.", text_format=Cat, max_output_tokens=120)
    assert isinstance(response.output_parsed, Cat)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"choice": ["yes", "no"]}, r"yes|no"),
        ({"regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}}, r"\[.*\]"),
    ],
)
def test_vllms_field(client: OpenAI, wanted: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="Is it?", max_tokens=40, extra_body={"structured_outputs": wanted}
    )
    assert re.fullmatch(pattern, answer.choices[0].text, re.DOTALL), answer.choices[0].text


def test_required_calls_are_calls(client: OpenAI) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    [call] = choice.message.tool_calls
    [(field, value)] = json.loads(call.function.arguments).items()
    assert value in WORDS[field] and call.function.name in ("weather", "time")


def test_required_calls_stream_as_the_clients_accumulator_expects(client: OpenAI) -> None:
    """The official client's own accumulation of streamed calls, which a strict tool also parses."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked: dict[str, Any] = {"model": "smollm2", "messages": ASK, "max_completion_tokens": 120, "tools": strict}
    parts, done = [], []
    with client.chat.completions.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                parts.append(event.arguments_delta)
            elif event.type == "tool_calls.function.arguments.done":
                done.append(event)
        [choice] = stream.get_final_completion().choices
    [call] = choice.message.tool_calls or []
    assert len(done) == 1 and "".join(parts) == done[0].arguments == call.function.arguments
    [(field, value)] = call.function.parsed_arguments.items()  # type: ignore[attr-defined]
    assert value in WORDS[field] and call.function.name in ("weather", "time")
    assert choice.finish_reason == "tool_calls" and not choice.message.content


def test_a_call_by_name_streams_its_arguments(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(chat(client, tools=TOOLS, tool_choice=named, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "weather" and calls[0].id.startswith("call_")
    assert json.loads("".join(call.function.arguments for call in calls))["city"] in WORDS["city"]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_demands_that_leave_no_token_are_the_requests_fault(client: OpenAI) -> None:
    """One that fails at its first token has a proper status, streamed or not; a client need not try again."""
    only = {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="no token was left") as caught:
            client.completions.create(model="smollm2", prompt="x", max_tokens=4, stream=stream, extra_body=only)
        assert caught.value.param == "structured_outputs"


def test_what_cannot_be_compiled_is_a_400(client: OpenAI) -> None:
    for wanted in ({"regex": "("}, {"json": {"type": "nonsense"}}, {"regex": "(a{1,999}){1,999}"}):
        with pytest.raises(openai.BadRequestError, match="structured_outputs"):
            client.completions.create(model="smollm2", prompt="x", extra_body={"structured_outputs": wanted})
    assert client.completions.create(model="smollm2", prompt="x", max_tokens=1).choices
