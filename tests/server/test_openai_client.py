"""The official ``openai`` package against ``headway serve`` with SmolLM2."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.server.live import Live

HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def client(smollm2: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{smollm2.url}/v1", api_key="unused", max_retries=0, timeout=60) as opened:
        yield opened


def test_models(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "smollm2" and client.models.retrieve("smollm2").owned_by == "headway"


def test_chat_and_its_stream_agree(client: OpenAI) -> None:
    options = {"model": "smollm2", "messages": HELLO, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_the_streaming_helper_of_the_client(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2",
        messages=HELLO,  # type: ignore[arg-type]
        stop=[" ", "\n"],  # the helper takes being cut short for a failure
        max_completion_tokens=200,
        n=2,
        logprobs=True,
        top_logprobs=2,
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert len(final.choices) == 2
    for choice in final.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        joined = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
        assert (choice.message.content or "").encode() in joined


def test_a_completion_knows_paris(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=5, logprobs=2
    )
    choice = answer.choices[0]
    assert "Paris" in choice.text
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text


def test_seeds_n_and_stop(client: OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model="smollm2", prompt="Once", n=3, seed=5, temperature=1.2, max_tokens=8, extra_body={"top_k": 50}
        )
        return [choice.text for choice in answer.choices]

    first = ask()
    assert first == ask() and len(set(first)) > 1
    stopped = client.completions.create(model="smollm2", prompt="2, 4, 6, 8,", temperature=0, max_tokens=30, stop="20")
    assert stopped.choices[0].finish_reason == "stop" and "20" not in stopped.choices[0].text


def test_sampling_fields_beyond_openais(client: OpenAI) -> None:
    ids = [28120, 260]
    extra = {"allowed_token_ids": ids, "ignore_eos": True, "min_p": 0.01, "repetition_penalty": 1.1, "top_k": 5}
    answer = client.completions.create(model="smollm2", prompt="x", max_tokens=4, extra_body=extra, logprobs=0)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens is not None
    assert set(answer.choices[0].logprobs.tokens) <= {"hello", " the"}


def test_penalties_and_bias_change_the_answer(client: OpenAI) -> None:
    banned = client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=3, logit_bias={"7042": -100}
    )
    assert "Paris" not in banned.choices[0].text

    def words(frequency_penalty: float) -> list[str]:
        answer = client.completions.create(
            model="smollm2",
            prompt="na na na na na na",
            temperature=0,
            max_tokens=8,
            frequency_penalty=frequency_penalty,
        )
        return answer.choices[0].text.split()

    assert len(set(words(0.0))) < len(set(words(2.0)))


def test_responses(client: OpenAI) -> None:
    whole = client.responses.create(model="smollm2", input="Say hello.", temperature=0, max_output_tokens=8)
    assert whole.output_text and whole.usage is not None
    with client.responses.stream(model="smollm2", input="Say hello.", temperature=0, max_output_tokens=8) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == whole.output_text


def test_errors_are_the_clients_own_classes(client: OpenAI, smollm2: Live) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model="smollm2", prompt="x", temperature=-3)
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="structured_outputs"):
        client.chat.completions.create(model="smollm2", messages=HELLO, extra_body={"guided_json": {}})  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="smollm2", prompt="word " * 400)
    assert long.value.code == "context_length_exceeded"
    assert unknown.value.request_id is not None and unknown.value.request_id.startswith("req-")


def test_many_streams_at_once_with_a_cache_smaller_than_they_need(smollm2: Live) -> None:
    """Eight may run, and the KV cache holds four of them: some wait or are preempted, none fails or changes."""

    async def run(numbers: range) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key="x", max_retries=0, timeout=120) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="smollm2",
                    prompt=f"{number} bottles of beer on the wall, " * 8,
                    max_tokens=40,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(number) for number in numbers))

    together = asyncio.run(run(range(8)))
    assert all(together)
    assert asyncio.run(run(range(7, 8))) == together[7:]


def test_every_request_of_this_module_gave_its_place_back(client: OpenAI, smollm2: Live) -> None:
    answers = client.completions.create(model="smollm2", prompt=["x"] * 8, max_tokens=1)
    assert len(answers.choices) == 8
    assert json.dumps([c.finish_reason for c in answers.choices]).count("length") == 8
