"""Every sampling field of a request reaches the engine, whichever route it comes by."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from headway.core.messages import AddRequest
from headway.server.protocol import Sampling
from tests.server.parrot import ParrotCore

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}
EVERYWHERE: dict[str, Any] = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "allowed_token_ids": [104, 105],
    "min_tokens": 2,
    "stop_token_ids": [111],
    "ignore_eos": True,
    "disable_spec_decode": True,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"105": -3.0},
    "seed": 12,
    "bad_words": ["zz"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "cache_salt": "mine",
}
ELSEWHERE = {
    *("model", "stream", "stop", "structured_outputs", "parse_special"),  # have tests of their own
    *(
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "service_tier",
    ),  # mean nothing to the engine
}
NOT_RESPONSES: dict[str, Any] = {
    "prompt_logprobs": 1,
    "logprob_token_ids": [104],
}
LENGTH = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens"}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[AddRequest]:
    """The requests that come to the engine."""
    seen: list[AddRequest] = []
    add = ParrotCore.add

    def note(self: ParrotCore, request: AddRequest) -> None:
        seen.append(request)
        add(self, request)

    monkeypatch.setattr(ParrotCore, "add", note)
    return seen


def test_no_field_is_forgotten_here() -> None:
    assert {*Sampling.__struct_fields__} == EVERYWHERE.keys() | ELSEWHERE


def post(client: TestClient, path: str, fields: dict[str, Any]) -> Any:
    answer = client.post(path, json={**BODIES[path], LENGTH.get(path, "max_output_tokens"): 3, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", [*EVERYWHERE, *NOT_RESPONSES])
def test_a_field_reaches_the_engine(client: TestClient, added: list[AddRequest], path: str, field: str) -> None:
    value = {**EVERYWHERE, **NOT_RESPONSES}[field]
    if field in NOT_RESPONSES and path == "/v1/responses":
        refused = client.post(path, json={**BODIES[path], field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field
        return
    post(client, path, {field: value})
    [request] = added
    if field == "bad_words":
        assert request.bad_words_token_ids
    elif field in ("seed", "cache_salt"):
        assert getattr(request, field) == value
    else:
        wanted = {int(key): bias for key, bias in value.items()} if field == "logit_bias" else value
        assert getattr(request.params, field) == wanted
    assert request.params.max_tokens == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_n_completions_with_seeds_of_their_own(
    client: TestClient, added: list[AddRequest], path: str, stream: bool
) -> None:
    body = {**BODIES[path], LENGTH[path]: 9, "n": 3, "seed": 40, "stream": stream}
    answer = client.post(path, json=body)
    assert answer.status_code == 200 and sorted(request.seed for request in added) == [40, 41, 42]
    if stream:
        assert all(f'"index":{i}' in answer.text for i in range(3)) and answer.text.rstrip().endswith("[DONE]")
    else:
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("path", BODIES)
def test_what_stops_and_what_is_shown(client: TestClient, path: str) -> None:
    def text(fields: dict[str, Any]) -> str:
        answer = client.post(path, json={**BODIES[path], LENGTH.get(path, "max_output_tokens"): 9, **fields}).json()
        if path == "/v1/responses":
            return str(answer["output"][0]["content"][0]["text"])
        choice = answer["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    assert text({}) == "hello"
    assert text({"stop_token_ids": [108]}) in ("he", "hel")
    if path != "/v1/responses":
        assert text({"stop": ["l"]}) == "he" and text({"stop": "l", "include_stop_str_in_output": True}) == "hel"
