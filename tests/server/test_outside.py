"""What probes from outside found, each as one of its kind."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headway.core.log import TextFormatter
from tests.server.conftest import MakeClient
from tests.server.live import Live, live_parrot
from tests.server.test_completions import error_of
from tests.server.test_connection import exchange

CHAT = "/v1/chat/completions"
HUGE = 10**40 + 7
"""An integer as JSON may hold it; no binary form has room for it."""
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live_parrot() as live:
        yield live.wait_ready()


# -- templates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES, "chat_template_kwargs": {"far": HUGE, "near": -HUGE}},
        {
            "messages": MESSAGES,
            "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"maximum": HUGE}}}}}],
        },
        {
            "messages": [
                *MESSAGES,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": HUGE})}}],
                },
                {"role": "tool", "content": "done", "tool_call_id": "1"},
            ]
        },
    ],
    ids=["kwargs", "tools", "calls"],
)
def test_integers_of_any_length_reach_the_template(
    make_client: MakeClient, tmp_path: Any, body: dict[str, Any]
) -> None:
    template = tmp_path / "all.jinja"
    template.write_text("{{ messages | tojson }}{{ tools | tojson }}{{ far }}{{ near }}", encoding="utf-8")
    client = make_client(chat=True, chat_template=str(template))
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    shown = client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    assert str(HUGE) in shown and ("chat_template_kwargs" not in body or str(-HUGE) in shown)


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f\n", "f\r", "\nf", "f g", "é", "f" * 129, ""])
def test_a_functions_name_is_one_word(client: TestClient, name: str) -> None:
    for body in (
        {"messages": MESSAGES, "tools": [{"function": {"name": name}}]},
        {"input": "hello", "tools": [{"type": "function", "name": name}]},
    ):
        error = error_of(client.post(CHAT if "messages" in body else "/v1/responses", json=body), 400)
        assert error["param"].endswith("name")
    assert (
        client.post(CHAT, json={"messages": MESSAGES, "tools": [{"function": {"name": "f" * 128}}]}).status_code == 200
    )


@pytest.mark.parametrize("key", ["1_0", " 5", "5 ", "+5", "05", "٣", "5.0", "1e1", "", "5" * 400])
def test_ids_of_logit_bias_are_written_plainly(client: TestClient, key: str) -> None:
    """Else two keys would name one token, and one of them be ignored."""
    error = error_of(client.post("/v1/completions", json={"prompt": "x", "logit_bias": {key: 1}}), 400)
    assert error["param"] == "logit_bias" and "integer token ids" in error["message"]
    assert client.post("/v1/completions", json={"prompt": "x", "logit_bias": {"5": 1, "0": -1}}).status_code == 200


@pytest.mark.parametrize(
    ("path", "given", "meant"),
    [
        ("/v1/completions", "max_completion_tokens", "max_tokens"),
        ("/v1/completions", "max_new_tokens", "max_tokens"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "max_completion_tokens", "max_output_tokens"),
        (CHAT, "max_output_tokens", "max_tokens"),
    ],
)
def test_another_routes_name_of_the_limit_is_understood(client: TestClient, path: str, given: str, meant: str) -> None:
    bodies: dict[str, dict[str, Any]]
    bodies = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}, CHAT: {"messages": MESSAGES}}
    error = error_of(client.post(path, json={**bodies[path], given: 5}), 400)
    assert error["param"] == given and f"did you mean '{meant}'?" in error["message"]


# -- headers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [("Content-Type", ["application/json", "text/plain"]), ("Content-Encoding", ["identity", "gzip"])],
)
def test_of_a_header_that_comes_twice_both_count(client: TestClient, name: str, values: list[str]) -> None:
    kind = [] if name == "Content-Type" else [("Content-Type", "application/json")]
    for given in (values, values[::-1]):
        headers = [*kind, *((name, value) for value in given)]
        assert error_of(client.post("/tokenize", content=b'{"prompt": "x"}', headers=headers), 415)


def test_of_two_keys_none_counts(make_client: MakeClient) -> None:
    """A proxy may have judged by the one, and this server would by the other."""
    client, good, bad = (
        make_client(api_key=["the-good-key"]),
        ("Authorization", "Bearer the-good-key"),
        ("Authorization", "x"),
    )
    assert client.get("/v1/models", headers=[good]).status_code == 200
    for headers in ([good, bad], [bad, good], [good, good], [good, bad, good], [bad, bad, good]):
        assert error_of(client.get("/v1/models", headers=headers), 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:8000", 200), ("localhost:", 200), ("[::1]:80", 200), ("localhost:\xb2", 403),
     ("localhost:8a", 403), ("localhost:80:80", 403), ("localhost.evil:80", 403)],
)  # fmt: skip
def test_ports_of_hosts(make_client: MakeClient, host: str, status: int) -> None:
    client = make_client(allowed_hosts=[], host="127.0.0.1")
    assert client.get("/version", headers=[(b"Host", host.encode("latin-1"))]).status_code == status


# -- HTTP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["HTTP/2.0", "HTTP/0.9", "HTTP/3.0"])
def test_other_versions_of_http_are_named(server: Live, version: str) -> None:
    for head in (f"GET /version {version}", f"POST /tokenize {version}"):
        status, error = exchange(server, f"{head}\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        assert (status, error["error"]["code"]) == (505, "http") and "HTTP/1.1" in error["error"]["message"]


def test_a_later_minor_version_is_answered(server: Live) -> None:
    """RFC 9110, 2.5: a minor version changes nothing that a recipient has to know of."""
    assert exchange(server, b"GET /version HTTP/1.2\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [(b"GET /?" + b"x" * 9000, 414), (b"GET /" + b"x" * 80_000, 431), (b"PUT /version", 405)],
)  # fmt: skip
def test_what_is_the_clients_fault_is_called_so(server: Live, head: bytes, status: int) -> None:
    got, error = exchange(server, head + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (got, error["error"]["type"]) == (status, "invalid_request_error")


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/a%20status%3D200", "/a%22%20status%3D200", "/a%0astatus=200", "/%c2%a0status=200"])
def test_a_path_forges_no_field(make_client: MakeClient, caplog: pytest.LogCaptureFixture, path: str) -> None:
    with caplog.at_level(logging.INFO, logger="headway.access"):
        make_client().get(path)
    [record] = [r for r in caplog.records if r.name == "headway.access"]
    line = TextFormatter().format(record)
    before, quoted, after = line.split('"')
    assert before.endswith(" path=") and after.startswith(" status=404 ") and "status" in quoted
    record.fields = {"path": "/v1/models", "status": 200, "finish": None}
    assert TextFormatter().format(record).endswith(" path=/v1/models status=200 finish=None")
