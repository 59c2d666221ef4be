"""/v1/completions over the parrot engine, which repeats the prompt byte by byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def events(client: TestClient, path: str, **body: Any) -> list[Any]:
    """The data of each event of a stream; the last one must be [DONE]."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def error_of(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_completion(client: TestClient) -> None:
    answer = ask(client, prompt="hello", max_tokens=50)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("hello", "stop", 0)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_sixteen_tokens_unless_asked(client: TestClient) -> None:
    [choice] = ask(client, prompt="a" * 40)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a" * 16, "length")


def test_min_tokens_raises_that_default(client: TestClient) -> None:
    assert len(ask(client, prompt="a" * 40, min_tokens=20)["choices"][0]["text"]) == 20


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["x", [99]], ["x", "c"]),
    ],
)
def test_all_forms_of_prompts(client: TestClient, prompt: Any, texts: list[str]) -> None:
    answer = ask(client, prompt=prompt, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", 1], "", [300], [[1, 300]], [-1], [True]])
def test_bad_prompts(client: TestClient, prompt: Any) -> None:
    assert "prompt" in str(error_of(client.post("/v1/completions", json={"prompt": prompt}))["param"])


def test_stop_strings(client: TestClient) -> None:
    [choice] = ask(client, prompt="one two three", stop=" th")["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two", "stop", " th")
    [choice] = ask(client, prompt="one two", stop=["tw"], include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "one tw"


def test_stop_token_ids_and_ignore_eos(client: TestClient) -> None:
    [choice] = ask(client, prompt="abc", stop_token_ids=[98])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("a", 98)
    [choice] = ask(client, prompt="abc", ignore_eos=True, max_tokens=6)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcxx", "length")


def test_echo(client: TestClient) -> None:
    assert ask(client, prompt="abc", echo=True)["choices"][0]["text"] == "abcabc"
    assert ask(client, prompt=[97, 98], echo=True)["choices"][0]["text"] == "abab"
    stream = events(client, "/v1/completions", prompt="abc", echo=True, n=2)
    for index in range(2):
        text = "".join(c["text"] for e in stream for c in e["choices"] if c["index"] == index)
        assert text == "abcabc"


def test_echo_alone_scores_a_prompt(client: TestClient) -> None:
    answer = ask(client, prompt="ab", echo=True, max_tokens=0, logprobs=1, add_special_tokens=False)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("limit", [-1, 0, 2**31])
def test_a_limit_that_is_none(client: TestClient, limit: int) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "x", "max_tokens": limit}))
    assert error["param"] == "max_tokens"


def test_a_schema_is_blamed_under_the_name_it_came_by(client: TestClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such"}}}
    for body in ({"response_format": schema}, {"structured_outputs": {"json": {"type": "no such"}}}):
        [field] = body
        error = error_of(client.post("/v1/completions", json={"prompt": "x", **body}))
        assert error["param"] == field and error["message"].startswith(f"{field}: json: type 'no such'")


def test_logprobs(client: TestClient) -> None:
    [choice] = ask(client, prompt="b€", logprobs=1, max_tokens=3)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["b", "bytes:\\xe2", "bytes:\\x82"], "parts of a character have names of their own"
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert logprobs["top_logprobs"][0] == {"b": -0.25, "a": -1.0}
    assert logprobs["text_offset"] == [0, 1, 2]


def test_echoed_logprobs_come_first(client: TestClient) -> None:
    [choice] = ask(client, prompt="ab", logprobs=0, echo=True, max_tokens=1, add_special_tokens=False)["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b", "a"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_prompt_logprobs_in_vllms_form(client: TestClient) -> None:
    [choice] = ask(client, prompt="ab", prompt_logprobs=1, add_special_tokens=False)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["98"] == {"logprob": -0.25, "rank": 2, "decoded_token": "b"}


def test_a_stream_adds_up(client: TestClient) -> None:
    stream = events(client, "/v1/completions", prompt=["a€b", "cd"], n=2, stream_options={"include_usage": True})
    last = stream.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 * (5 + 1) + 2 * (2 + 1)
    assert all(event["usage"] is None for event in stream)
    texts = [""] * 4
    reasons: list[list[str]] = [[], [], [], []]
    for event in stream:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == ["a€b", "a€b", "cd", "cd"]
    assert reasons == [["stop"]] * 4
    assert len({event["id"] for event in stream}) == 1


def test_streamed_logprobs_and_usage_in_every_chunk(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = events(client, "/v1/completions", prompt="abcd", logprobs=0, stream_options=options)
    stream.pop()
    tokens = [t for e in stream for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["tokens"]]
    offsets = [o for e in stream for c in e["choices"] if c["logprobs"] for o in c["logprobs"]["text_offset"]]
    assert tokens[:4] == ["a", "b", "c", "d"] and offsets[:4] == [0, 1, 2, 3]
    counts = [event["usage"]["completion_tokens"] for event in stream]
    assert counts == sorted(counts) and counts[-1] == 5


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("guided_json", {}, "structured_outputs"),
        ("best_of", 2, "n"),
        ("suffix", "x", "middle"),
        ("priority", 1, "order"),
        ("max_token", 1, "max_tokens"),
        ("nonsense", 1, "unknown"),
        ("prompt_embeds", "AAAA", "token ids"),
        ("logits_processors", ["os.system"], "code"),
        ("chat_template", "{{ 1 }}", "refused"),
        ("request_id", "mine", "made by the server"),
        ("store", True, "kept"),
        ("n", 0, "n"),
        ("n", 300, "n"),
        ("temperature", -1, "temperature"),
        ("top_p", 0, "top_p"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"999": 1}, "999"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("logprob_token_ids", [], "logprobs=0"),
        ("logprobs", 99, "max_logprobs"),
        ("max_tokens", 0, "echo"),
        ("max_tokens", "5", "max_tokens"),
        ("stop", [""], "stop"),
        ("stream_options", {"include_usage": True}, "stream"),
        ("stream_options", {"other": True}, "other"),
        ("cache_salt", "", "cache_salt"),
        ("prompt_logprobs", -1, "prompt_logprobs"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(client: TestClient, field: str, value: Any, words: str) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "x", field: value}))
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(field)


def test_harmless_fields_are_taken(client: TestClient) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": None}
    harmless |= {"best_of": 1, "suffix": None, "functions": None, "logit_bias": None, "stop": None}
    assert ask(client, prompt="x", **harmless)["choices"][0]["text"] == "x"


def test_a_prompt_too_long_for_the_context(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "x" * 5000}))
    assert error["code"] == "context_length_exceeded"


def test_a_failure_inside_the_engine(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "fail"}), 500)
    assert "failure asked for" in error["message"]


def test_the_model_is_checked(client: TestClient) -> None:
    assert ask(client, prompt="x", model="parrot")["model"] == "parrot"
    error = error_of(client.post("/v1/completions", json={"prompt": "x", "model": "gpt-5"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
