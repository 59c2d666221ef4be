"""Routes of models that pool: answers in everybody's form, and errors that say what to do."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from headway import AsyncLLM
from headway.server.app import POOLING_ROUTES, Front, build_app
from headway.server.openapi import KINDS
from headway.server.pooling import call
from headway.server.settings import ServerSettings
from tests.api import pooling_core
from tests.api.pooling_core import CLS, SEP, WORDS
from tests.examples import examples
from tests.server.pooling_app import pooling_llm

Open = Callable[..., TestClient]


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, AsyncLLM]]:
    made: dict[str, AsyncLLM] = {}
    yield made
    for llm in made.values():
        llm.shutdown()


@pytest.fixture
def serve(llms: dict[str, AsyncLLM]) -> Iterator[Open]:
    """Makes a client of a server with this model."""
    opened: list[TestClient] = []

    def make(name: str, **chosen: Any) -> TestClient:
        if name not in llms:
            llms[name] = pooling_llm(name)
        app = build_app(llms[name], ServerSettings(**{"allowed_hosts": ["*"], "access_log": False, **chosen}))
        client = TestClient(app, raise_server_exceptions=False)
        client.__enter__()
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def told(answer: Any, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


def framed(text: str) -> list[int]:
    return [CLS, *(WORDS.index(word) for word in text.split()), SEP]


def test_embeddings_of_every_form_of_input(serve: Open) -> None:
    client = serve("embed")
    expected = [3.0, float(sum(framed("w1"))), 2.0, 3.0, 0.0, 0.0, 0.0, 1.0]
    for given_input in ("w1", ["w1"], framed("w1"), [framed("w1")]):
        body = {"input": given_input, "model": "pools", "user": "me"}
        answer = told(client.post("/v1/embeddings", json=body))
        assert answer["object"] == "list" and answer["model"] == "pools" and answer["id"].startswith("embd-")
        assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": expected}]
        assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    answer = told(client.post("/v1/embeddings", json={"input": ["w1", "w2 w3"], "encoding_format": "base64"}))
    rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]]
    assert rows[0].tolist() == expected and rows[1][0] == 4 and answer["usage"]["prompt_tokens"] == 7
    cut = told(client.post("/embeddings", json={"input": "w1", "dimensions": 2, "normalize": True}))
    assert cut["data"][0]["embedding"] == pytest.approx(
        (np.array(expected[:2]) / np.linalg.norm(expected[:2])).tolist()
    )


def test_the_short_way_to_an_endpoint_answers_as_the_long_one(llms: dict[str, AsyncLLM]) -> None:
    llm = llms.setdefault("embed", pooling_llm("embed"))
    chosen: dict[str, Any] = {
        "api_key": ["a secret key"],
        "allowed_origins": ["https://a.example"],
        "allowed_hosts": ["*"],
    }
    app = build_app(llm, ServerSettings(**chosen))
    passed: list[str] = []
    route = app.router.app

    async def router(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])
        await route(scope, receive, send)

    app.router.middleware_stack = router
    key = {"Authorization": "Bearer a secret key", "Origin": "https://a.example"}

    def answers(caller: Any) -> list[Any]:
        client = TestClient(caller, raise_server_exceptions=False)
        found = []
        for method, path, headers, body in (
            ("POST", "/v1/embeddings", key, {"input": "w1"}),
            ("POST", "/embeddings", key, {"input": "fail"}),
            ("POST", "/v1/embeddings", key, {"input": "w1", "model": "other"}),
            ("POST", "/v1/embeddings", {}, {"input": "w1"}),
            ("POST", "/v1/completions", key, {"prompt": "w1"}),
            ("POST", "/tokenize", key, {"prompt": "w1"}),
            ("POST", "/v1/nothing", key, {}),
            ("GET", "/v1/embeddings", key, None),
            ("OPTIONS", "/v1/embeddings", {**key, "Access-Control-Request-Method": "POST"}, None),
        ):
            answer = client.request(method, path, headers=headers, json=body)
            names = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "date")}
            content = answer.json() if names["content-type"] == "application/json" else answer.text
            if isinstance(content, dict):
                content.pop("id", None), content.pop("created", None)
                del names["content-length"]
            found.append((answer.status_code, sorted(names.items()), content))
        return found

    long, short = answers(app), answers(Front(app))
    assert short == long
    assert [status for status, *_ in long] == [200, 500, 404, 401, 400, 200, 404, 405, 200]
    assert set(passed) == {"/v1/nothing", "/v1/embeddings"}, "the router had no request that an endpoint takes"


def test_large_answers_are_written_in_a_thread(serve: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "INLINE_FLOATS", 100)
    texts = [f"w{i % 90}" for i in range(300)]
    data = told(serve("embed").post("/v1/embeddings", json={"input": texts}))["data"]
    assert [each["index"] for each in data] == list(range(300))
    assert [each["embedding"][1] for each in data] == [sum(framed(text)) for text in texts]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["w1", ""]}, "input", "input 1 is empty"),
        ({"input": ["w1", 3]}, "input", "mixes token ids"),
        ({"input": [[]]}, "input", "no tokens"),
        ({"input": [[100]]}, "input", "vocabulary"),
        ({"input": "w1 " * 70}, "input", "truncate_prompt_tokens"),
        ({"input": "w1", "dimensions": 0}, "dimensions", "from 1"),
        ({"input": "w1", "dimensions": 9}, "dimensions", "at most 8"),
        ({"input": "w1", "dimensions": "all"}, "dimensions", "int"),
        ({"input": "w1", "encoding_format": "int8"}, "encoding_format", "float, base64"),
        ({"input": "w1", "truncate_prompt_tokens": 100}, "truncate_prompt_tokens", "max_model_len"),
        ({"input": "w1", "prompt_name": "query"}, "prompt_name", "no prompts"),
        ({"input": "w1", "temperature": 1}, "temperature", "unknown field"),
        ({"input": "w1", "inputs": "w1"}, "inputs", "did you mean 'input'"),
        ({"input": "w1", "rank_fields": ["a"]}, "rank_fields", "not served"),
        ({"input": "fail"}, None, "failure asked for"),
    ],
)
def test_wrong_bodies_are_told_what_is_wrong(serve: Open, body: Any, param: str | None, words: str) -> None:
    error = told(serve("embed").post("/v1/embeddings", json=body), 400 if param else 500)["error"]
    assert error["param"] == param and words in error["message"], error
    if words == "truncate_prompt_tokens":
        assert error["code"] == "context_length_exceeded"


def test_a_model_of_another_kind_says_what_it_serves(serve: Open) -> None:
    client = serve("embed")
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}),
        ("/v1/completions", {"prompt": "w1"}),
        ("/v1/responses", {"input": "w1"}),
    ):
        error = told(client.post(path, json=body), 400)["error"]
        assert "generates nothing, it serves embed (/v1/embeddings)" in error["message"]
        assert error["code"] == "model_not_supported" and error["param"] == "model"
    for path, body in (
        ("/classify", {"input": "w1"}),
        ("/embed_all", {"inputs": "w1"}),
        ("/predict", {"inputs": "w1"}),
        ("/pooling", {"input": "w1", "task": "classify"}),
    ):
        assert "serves embed (/v1/embeddings), not" in told(client.post(path, json=body), 400)["error"]["message"]
    assert "no sparse" in told(client.post("/embed_sparse", json={"inputs": "w1"}), 400)["error"]["message"]
    labels = serve("labels")
    assert (
        "serves classify (/classify), not"
        in told(labels.post("/rerank", json={"query": "w1", "documents": ["w2"]}), 400)["error"]["message"]
    )
    assert "not embed" in told(labels.post("/v1/embeddings", json={"input": "w1"}), 400)["error"]["message"]
    assert told(client.post("/tokenize", json={"prompt": "w1"}))["tokens"] == framed("w1")


def test_huge_batches_are_bounded(serve: Open) -> None:
    client = serve("embed", max_inputs=5)
    error = told(client.post("/v1/embeddings", json={"input": ["w1"] * 6}), 400)["error"]
    assert error["param"] == "input" and "6 texts; one request may have 5 (--max-inputs)" in error["message"]
    error = told(client.post("/rerank", json={"query": "w1", "documents": ["w1"] * 6}), 400)["error"]
    assert error["param"] == "documents" and "6 texts" in error["message"]
    assert len(told(client.post("/v1/embeddings", json={"input": ["w1"] * 5}))["data"]) == 5
    full = serve("embed", max_queue=0)
    error = told(full.post("/v1/embeddings", json={"input": ["w1"] * 5}), 400)["error"]
    assert "can never be admitted: this server holds 4" in error["message"] and error["param"] == "input"


def test_places_come_back_and_who_takes_too_long_is_stopped(serve: Open) -> None:
    few = serve("embed", max_queue=1, request_timeout=0.2)  # 4 rows and 8 texts that wait
    for _ in range(3):
        assert len(told(few.post("/v1/embeddings", json={"input": ["w1"] * 12}))["data"]) == 12
        assert (
            "--request-timeout"
            in told(few.post("/v1/embeddings", json={"input": ["hang"] * 9}), 504)["error"]["message"]
        )
        assert few.post("/v1/embeddings", json={"input": ["w1", "", "w2"]}).status_code == 400
    assert few.app.state.service.lifecycle.num_sequences == 0  # type: ignore[attr-defined]


def test_keys_are_asked_for_on_every_route(serve: Open) -> None:
    client = serve("embed", api_key=["a-secret-key"])
    for path, *_ in POOLING_ROUTES:
        assert client.post(path, json={}).status_code == 401
    assert client.get("/info").status_code == 401
    headers = {"Authorization": "Bearer a-secret-key"}
    assert client.post("/v1/embeddings", json={"input": "w1"}, headers=headers).status_code == 200


def test_pooling_gives_whatever_there_is(serve: Open) -> None:
    answer = told(serve("tokens").post("/pooling", json={"input": ["w1", "w2 w3"]}))
    assert answer["data"][0] == {"index": 0, "object": "pooling", "data": [[2.0, 0.0], [8.0, 1.0], [3.0, 2.0]]}
    packed = told(serve("tokens").post("/pooling", json={"input": "w1", "encoding_format": "base64"}))["data"][0]
    assert packed["shape"] == [3, 2]
    assert np.frombuffer(base64.b64decode(packed["data"]), "<f4").tolist() == [2, 0, 8, 1, 3, 2]
    both = serve("both")
    assert len(told(both.post("/pooling", json={"input": "w1"}))["data"][0]["data"]) == 8
    by_token = told(both.post("/pooling", json={"input": "w1", "task": "token_embed", "dimensions": 1}))
    assert by_token["data"][0]["data"] == [[2.0], [8.0], [3.0]]
    assert told(both.post("/embed_all", json={"inputs": "w1"}))[0][1] == [8.0, 1.0]


def test_classify_and_predict(serve: Open) -> None:
    client = serve("labels")
    answer = told(client.post("/classify", json={"input": ["w1", "w2"]}))
    assert answer["data"][0] == {"index": 0, "label": "good", "probs": [0.0, 0.0, 1.0], "num_classes": 3}
    assert answer["id"].startswith("classify-") and len(answer["data"]) == 2
    expected = [{"score": 1.0, "label": "good"}, {"score": 0.0, "label": "bad"}, {"score": 0.0, "label": "fair"}]
    assert told(client.post("/predict", json={"inputs": "w1"})) == expected
    assert told(client.post("/predict", json={"inputs": [["w1"], ["w2"], ["w3"]]})) == [expected] * 3
    refused: list[Any] = [["w1", "w2", "w3"], [], [["w1", "w2", "w3"]], [[]], ["w1", ["w2"]]]
    for wrong in refused:
        assert told(client.post("/predict", json={"inputs": wrong}), 400)["error"]["param"] == "inputs"
    assert told(client.post("/predict", json={"inputs": ["w1", "w2"]})) == expected
    body = {"input": "w1", "text_pair": ["w2", "w3 w4"]}
    answer = told(client.post("/classify", json=body))
    assert [each["index"] for each in answer["data"]] == [0, 1] and answer["usage"]["prompt_tokens"] == 11
    for changes, param in (
        ({"text_pair": []}, "text_pair"), ({"text_pair": ["w2", ""]}, "text_pair"), ({"input": [2, 8, 3]}, "input"),
        ({"input": ["w1", "w2"], "text_pair": ["w1"] * 3}, "input"), ({"text_pair": [1]}, "text_pair"),
        ({"input": ""}, "input"),
    ):  # fmt: skip
        error = told(client.post("/classify", json={**body, **changes}), 400)["error"]
        assert error["param"].partition("[")[0] == param, error
    assert told(client.post("/classify", json={**body, "text_pair": ["w1"] * 3000}), 400)["error"]["param"] == "input"
    assert len(told(client.post("/predict", json={"inputs": "w1", "raw_scores": True}))) == 3
    pair = told(serve("cross").post("/predict", json={"inputs": ["w1", "w2"]}))
    assert pair == [{"score": 3.0, "label": "LABEL_0"}]


def test_score_under_all_names(serve: Open) -> None:
    client = serve("cross")
    for one, two in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
        for path in ("/score", "/v1/score"):
            answer = told(client.post(path, json={one: "w1 w2", two: ["w3", "w4"]}))
            assert answer["data"] == [{"index": i, "object": "score", "score": 4.0} for i in range(2)]
            assert answer["usage"]["prompt_tokens"] == 12
        error = told(client.post("/score", json={one: ["w1"] * 2, two: ["w1"] * 3}), 400)["error"]
        assert error["param"] == one and "2 texts" in error["message"]
        error = told(client.post("/score", json={one: "w1", two: ["w1", ""]}), 400)["error"]
        assert error["param"] == two and error["message"].startswith("text 1 of")
    for wrong in ({}, {"text_1": "w1"}, {"text_1": "w1", "data_2": "w2"}):
        assert told(client.post("/score", json=wrong), 400)["error"]["param"] == "text_1"
    assert (
        told(client.post("/score", json={"text_1": ["w1", "w1 w2"], "text_2": ["w3", "w4"]}))["data"][1]["score"] == 4
    )


def test_rerank_in_the_forms_of_jina_cohere_and_tei(serve: Open) -> None:
    client = serve("embed")
    documents = ["w9 w9 w9 w9", "w1", {"text": "w2 w3"}]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = told(client.post(path, json={"query": "w1", "documents": documents, "top_n": 2}))
        results = answer["results"]
        assert [each["index"] for each in results] == [1, 2] and results[0]["relevance_score"] == pytest.approx(1)
        assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] == 3 + 6 + 3 + 4
        assert [each.get("document") for each in results] == (
            [None, None] if path == "/v2/rerank" else [{"text": "w1"}, {"text": "w2 w3"}]
        )
    bare = told(client.post("/rerank", json={"query": "w1", "documents": documents, "return_documents": False}))
    assert len(bare["results"]) == 3 and "document" not in bare["results"][0]
    ranked = told(client.post("/rerank", json={"query": "w1", "texts": ["w9 w9 w9 w9", "w1"], "return_text": True}))
    assert [each["index"] for each in ranked] == [1, 0] and ranked[0]["text"] == "w1" and ranked[0]["score"] > 0.99
    long = {"query": "w1", "texts": ["w1 " * 99], "truncate": True, "truncation_direction": "Left"}
    assert len(told(client.post("/rerank", json=long))) == 1
    assert told(client.post("/similarity", json={"inputs": {"source_sentence": "w1", "sentences": ["w1"]}})) == [
        pytest.approx(1)
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "w1"}, "documents"),
        ({"query": "w1", "documents": ["w1"], "texts": ["w1"]}, "documents"),
        ({"query": "w1", "documents": []}, "documents"),
        ({"query": "", "documents": ["w1"]}, "query"),
        ({"query": "w1", "documents": [""]}, "documents"),
        ({"query": "w1", "documents": [{"title": "w1"}]}, "documents[0]"),
        ({"query": "w1", "documents": ["w1"], "return_text": True}, "return_text"),
        ({"query": "w1", "texts": ["w1"], "top_n": 1}, "top_n"),
        ({"query": "w1", "documents": ["w1 " * 99]}, "documents"),
        ({"query": "w1", "documents": ["w1"], "instruction": "w2"}, "instruction"),
        ({"query": "w1", "documents": ["w1"], "use_activation": True}, "use_activation"),
        ({"query": "w1", "documents": ["w1"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
def test_wrong_reranks(serve: Open, body: Any, param: str) -> None:
    assert told(serve("embed").post("/rerank", json=body), 400)["error"]["param"] == param


def test_teis_embed_and_sparse_and_info(serve: Open) -> None:
    client = serve("embed")
    whole = np.array(told(client.post("/embed", json={"inputs": ["w1", "w2"], "normalize": False})))
    unit = np.array(told(client.post("/embed", json={"inputs": ["w1", "w2"]})))
    assert unit == pytest.approx(whole / np.linalg.norm(whole, axis=1, keepdims=True)) and whole[0][0] == 3
    cut = told(client.post("/embed", json={"inputs": "w1 " * 99, "truncate": True, "normalize": False}))
    assert cut[0][0] == 64
    facts = told(client.get("/info"))
    assert facts["model_type"] == {"embedding": {"pooling": "last"}} and facts["max_client_batch_size"] == 2048
    assert told(serve("labels").get("/info"))["model_type"]["classifier"]["id2label"]["2"] == "good"
    sparse = serve('embed {"width": 100, "sparse": true}')
    found = told(sparse.post("/embed_sparse", json={"inputs": ["w1 w1", "w2"]}))
    assert found[0] == [{"index": 2, "value": 0.5}, {"index": 3, "value": 0.5}, {"index": 8, "value": 1.0}]
    assert "/embed_sparse" in told(sparse.post("/v1/embeddings", json={"input": "w1"}), 400)["error"]["message"]


def test_teis_route_without_a_name_is_the_models_own(serve: Open) -> None:
    for name, path, body in (
        ("embed", "/embed", {"inputs": ["w1", "w2"], "truncate": True}),
        ("labels", "/predict", {"inputs": "w1 w2"}),
        ("cross", "/rerank", {"query": "w1", "texts": ["w2", "w1"]}),
        ('embed {"width": 100, "sparse": true}', "/embed_sparse", {"inputs": "w1"}),
    ):
        client = serve(name)
        assert told(client.post("/", json=body)) == told(client.post(path, json=body)), name
        assert client.get("/").headers["content-type"].startswith("text/html"), "the page stays where it was"
    error = told(serve("embed").post("/", json={"inputs": "w1 " * 99}), 400)["error"]
    assert error["param"] == "inputs" and "truncate" in error["message"] and "truncate_prompt" not in error["message"]


def test_what_cuts_texts_of_similarity_stands_in_either_place(serve: Open) -> None:
    client, inputs = serve("embed"), {"source_sentence": "w1", "sentences": ["w2 " * 99]}
    assert told(client.post("/similarity", json={"inputs": inputs, "parameters": {}}), 400)["error"]["param"]
    cut = {"truncate": True, "truncation_direction": "left"}
    found = told(client.post("/similarity", json={"inputs": inputs, "parameters": cut}))
    assert found == told(client.post("/similarity", json={"inputs": inputs, **cut}))
    both = {"inputs": inputs, "parameters": cut, "truncate": True}
    assert told(client.post("/similarity", json=both), 400)["error"]["param"] == "truncate"


def test_metrics_know_tasks(serve: Open) -> None:
    client = serve("both")
    for task in ("embed", "token_embed"):
        told(client.post("/pooling", json={"input": ["w1", "w2"], "task": task}))
    text = client.get("/metrics").text
    assert 'headway:pooling_requests_total{model_name="pools",task="token_embed"}' in text
    figures = told(client.get("/live/figures"))
    assert figures["info"]["tasks"] == ["embed", "token_embed"] and figures["requests"]["tasks"]["embed"] >= 2


@pytest.mark.parametrize("name", ["embed", "cross", "labels", "tokens"])
@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_breaks_the_server(
    serve: Open, monkeypatch: pytest.MonkeyPatch, name: str, mode: GenerationMode
) -> None:
    for number, word in enumerate(("FAIL", "WRONG", "HANG")):  # no input may ask the engine to misbehave
        monkeypatch.setattr(pooling_core, word, -1 - number)
    app = serve(name).app
    description = schemathesis.openapi.from_asgi("/openapi.json", app)
    for path, *_ in POOLING_ROUTES:

        @given(case=description[path]["POST"].as_strategy(generation_mode=mode))
        @examples(4, suppress_health_check=list(HealthCheck), database=None)
        def ask(case: Any) -> None:
            case.call_and_validate(checks=(not_a_server_error, status_code_conformance, content_type_conformance))

        ask()


def test_the_description_holds_every_body(serve: Open) -> None:
    document = serve("embed").get("/openapi.json").json()
    assert {kind.__name__ for kind in KINDS} <= set(document["components"]["schemas"])
    check = jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/EmbeddingRequest", "components": document["components"]}
    ).is_valid
    assert check({"input": [[1, 2]]}) and not check({"input": "x", "temperature": 1}) and not check({})


def test_embeddings_by_task(serve: Open) -> None:
    client = serve('embed {"adapters": ["retrieval.query", "separation"], "prompts": {"retrieval.query": "w9 "}}')
    plain, query, apart = (
        told(client.post("/v1/embeddings", json={"input": "w1", **more}))["usage"]["prompt_tokens"]
        for more in ({}, {"task": "retrieval.query"}, {"task": "separation"})
    )
    assert (plain, query, apart) == (3, 4, 3)
    error = told(client.post("/v1/embeddings", json={"input": "w1", "task": "query"}), 400)["error"]
    assert error["param"] == "task" and "'retrieval.query', 'separation'" in error["message"]
    error = told(serve("embed").post("/v1/embeddings", json={"input": "w1", "task": "separation"}), 400)["error"]
    assert error["param"] == "task" and "has no adapters" in error["message"]


def test_errors_speak_of_the_fields_of_their_route(serve: Open) -> None:
    client = serve("cross")
    for path, body, param, says in (
        ("/rerank", {"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n", "top_n must be at least 1; got 0"),
        ("/rerank", {"query": "w1", "documents": ["w1", ""]}, "documents", "text 1 of documents is empty"),
        ("/score", {"text_1": ["w1"] * 2, "text_2": "w1"}, "text_1", "text_1 has 2 texts and text_2 1"),
        ("/predict", {"inputs": [["w1", ""]]}, "inputs", "inputs is empty"),
    ):
        error = told(client.post(path, json=body), 400)["error"]
        assert error["param"] == param and error["message"].startswith(says), error


@pytest.mark.parametrize("written_by", ["orjson", "msgspec"])
def test_numbers_as_text_give_the_same_float32(monkeypatch: pytest.MonkeyPatch, written_by: str) -> None:
    if written_by == "msgspec":
        monkeypatch.setattr(call, "orjson", None)
    else:
        pytest.importorskip("orjson")
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.array([0.1, -0.0, 1e-45, 3.4028235e38], np.float32)])
    for array in (values, values[::2], values[:8].reshape(2, 4)):
        again = np.array(json.loads(call.numbers(array, None))).astype(np.float32)
        assert again.shape == array.shape and again.tobytes() == np.ascontiguousarray(array).tobytes()
    assert json.loads(call.numbers(np.array([np.nan, np.inf], np.float32), None)) == [None, None]
