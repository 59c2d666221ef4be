"""The whole of it on real weights: text in, text out, in one process and in two."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headway import LLM, AsyncLLM, InvalidRequestError, RequestOutput, SamplingParams, UnknownParameterError
from headway.engine.process import ProcessClient

SIZES = {"max_model_len": 256, "max_num_seqs": 8, "dtype": "float32", "device": "cpu"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["The capital of France is", "2, 4, 6, 8,", "Once upon a time"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", **SIZES) as engine:
        yield engine


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_it_knows_paris(llm: LLM) -> None:
    assert "Paris" in llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text


def test_two_processes_give_what_one_gives_and_leave_nothing(llm: LLM) -> None:
    threads = set(threading.enumerate())
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=10, n=2, logprobs=2)
    wanted = llm.generate(PROMPTS, params)
    with LLM("smollm2", multiprocess=True, run_ahead=2, **SIZES) as other:
        got = other.generate(PROMPTS, params)
        client = other._client
        assert isinstance(client, ProcessClient)
        process = client._link.child
    for mine, theirs in zip(got, wanted, strict=True):
        for left, right in zip(mine.outputs, theirs.outputs, strict=True):
            assert (left.text, left.token_ids, left.finish_reason) == (right.text, right.token_ids, right.finish_reason)
    assert any(output.outputs[0].token_ids != output.outputs[1].token_ids for output in got), "n draws differ"
    assert process.poll() is not None, "the engine process is gone"
    assert set(threading.enumerate()) <= threads


def test_stop_strings_logprobs_and_chat(llm: LLM) -> None:
    output = llm.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=30, stop=["20"], logprobs=1))[0]
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason == "20" and "20" not in completion.text
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    assert all(row[token].decoded_token is not None for row, token in zip(completion.logprobs, completion.token_ids))
    answer = llm.chat([{"role": "user", "content": "Say hello."}], GREEDY)[0]
    assert answer.outputs[0].text and answer.prompt_token_ids[0] != 0


def test_a_repeated_prompt_hits_the_cache(llm: LLM) -> None:
    prompt = "A long prompt about the sea. " * 12
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert second.num_cached_tokens > 0 and second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "empty"), ("word " * 400, "256"), ({"prompt_token_ids": [49152]}, "49152"), ({"prompt": "x", "y": 1}, "y")],
)
def test_bad_prompts_never_reach_the_engine(llm: LLM, prompt: object, words: str) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
    assert llm.stats().num_steps == steps


def test_unknown_arguments_are_refused_with_a_hint() -> None:
    with pytest.raises(UnknownParameterError, match="max_model_len"):
        LLM("smollm2", max_model_length=8)
    with pytest.raises(UnknownParameterError, match="top_k"):
        SamplingParams(topk=3)  # type: ignore[call-arg]


def test_streams_and_aborts_when_the_consumer_leaves() -> None:
    async def session() -> tuple[str, int]:
        engine = AsyncLLM("smollm2", multiprocess=False, **SIZES)
        try:
            last = ""
            async for output in engine.generate(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=200)):
                assert output.outputs[0].text.startswith(last)
                last = output.outputs[0].text
                if len(output.outputs[0].token_ids) >= 5:
                    break
            while (await engine.stats()).num_running:
                await asyncio.sleep(0)
            return last, (await engine.stats()).generation_tokens
        finally:
            engine.shutdown()

    text, generated = asyncio.run(asyncio.wait_for(session(), 120))
    assert text and generated < 200


FRONT_END_FEATURES: dict[str, dict[str, Any]] = {
    "stop": {"stop": [" the", "\n\n"], "max_tokens": 40},
    "stop kept": {"stop": [" the"], "include_stop_str_in_output": True, "max_tokens": 40},
    "several": {"n": 3, "seed": 11, "temperature": 1.0},
    "bad words": {"bad_words": ["Paris", "10"], "temperature": 0.0},
    "special tokens shown": {"skip_special_tokens": False, "ignore_eos": True},
    "no text": {"detokenize": False},
    "seedless": {},
}


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_text_is_the_same_at_every_depth(llm: LLM, run_ahead: int) -> None:
    """What the front end decides (stop strings, text) lags behind a deeper queue and must not show it."""
    params = [SamplingParams(**({"max_tokens": 16, "seed": 5} | fields)) for fields in FRONT_END_FEATURES.values()]
    prompts = [PROMPTS[0]] * len(params)
    wanted = llm.generate(prompts, params)
    with LLM("smollm2", run_ahead=run_ahead, **SIZES) as other:
        got = other.generate(prompts, params)
    for mine, theirs in zip(got, wanted, strict=True):
        for left, right in zip(mine.outputs, theirs.outputs, strict=True):
            assert (left.text, left.token_ids) == (right.text, right.token_ids)
            assert (left.finish_reason, left.stop_reason) == (right.finish_reason, right.stop_reason)
