"""Keys, hosts, ids, limits of bodies, and errors: what every request meets before its route."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from headway import __version__
from headway.core.errors import ConfigError
from headway.core.log import JsonFormatter, TextFormatter
from headway.server import decode
from headway.server.decode import MAX_PARTS, Body
from headway.server.errors import ApiError
from headway.server.lifecycle import Lifecycle, Phase
from headway.server.settings import ServerSettings
from tests.server.conftest import MakeClient
from tests.server.parrot import MAX_LEN
from tests.server.test_completions import error_of

PATH = "/v1/completions"
KEYS = ["first-key", "second-key"]
ROUTES = ["/v1/models", "/ready", "/version", "/openapi.json", "/nope", "/", "//health", "/health/", "/health/../ready"]


@pytest.mark.parametrize("path", [*ROUTES, "/v1/models/parrot"])
def test_every_route_but_health_asks_for_a_key(make_client: MakeClient, path: str) -> None:
    client = make_client(api_key=KEYS)
    assert error_of(client.get(path), 401)["code"] == "invalid_api_key"
    for wrong in ("", "Bearer", "Bearer x", "Bearer first-keyx", "Bearer first-ke", "Basic first-key", "first-key"):
        assert client.get(path, headers={"Authorization": wrong}).status_code == 401, wrong
    assert client.get("/health").status_code == client.get("/live").status_code == 200
    for post in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        assert client.post(post, json={}).status_code == 401


class Anything(msgspec.Struct):
    """A body."""

    value: Any = None


def taken(body: Body, value: bytes) -> bool:
    try:
        body.decode(b'{"value": ' + value + b"}", Anything)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("deepest", [1, 2, 5, 40])
def test_bodies_as_deep_as_is_allowed_are_taken_and_no_deeper_ones(deepest: int) -> None:
    body = Body(2**20, deepest, 2**20)
    for opened, closed, inside in ((b"[", b"]", b""), (b'{"a":', b"}", b"1"), (b'[{"a":', b"}]", b"[]")):
        levels = len(opened.replace(b'"a":', b""))
        for depth in range(levels, deepest + 3):
            number, rest = divmod(depth - (inside == b"[]"), levels)
            if rest == 0:
                assert taken(body, opened * number + inside + closed * number) == (depth <= deepest), depth


def test_bodies_of_as_many_parts_as_are_allowed_are_taken_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PARTS", 100)
    body = Body(2**20, 10, 2**20)
    for number in (96, 97, 98):  # two more are the body's own
        lists = b"[" + b",".join([b"[]"] * number) + b"]"
        assert taken(body, lists) == (number + 3 <= 100)


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens(make_client: MakeClient, key: str) -> None:
    client = make_client(api_key=KEYS)
    assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize("given", ["first-key", "second-key", "x" * 5000, "first-ke", ""])
def test_a_key_is_compared_in_constant_time(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Every known key takes part, by digests of one length, whichever matches: time tells nothing of any."""
    client, seen = make_client(api_key=KEYS), []

    def compare(known: bytes, digest: bytes) -> bool:
        seen.append((known, digest))
        return known == digest

    monkeypatch.setattr("headway.server.door.hmac.compare_digest", compare)
    status = client.get("/v1/models", headers={"Authorization": f"Bearer {given}"}).status_code
    assert status == (200 if given in KEYS else 401)
    assert len({known for known, _ in seen}) == len(seen) == len(KEYS)
    assert {len(side) for pair in seen for side in pair} == {32} and not any(
        key.encode() in pair for pair in seen for key in KEYS
    )


def test_what_the_server_says_of_itself(make_client: MakeClient) -> None:
    client = make_client()
    assert client.get("/version").json() == {"version": __version__}
    assert client.get("/live").json() == {"status": "alive"}
    assert client.get("/health").json() == {"status": "ready"} and client.get("/ready").json() == {"status": "ready"}
    models = client.get("/v1/models").json()
    assert models["object"] == "list" and models["data"] == [client.get("/v1/models/parrot").json()]
    assert models["data"][0]["max_model_len"] == MAX_LEN
    assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    for path in (
        "/health",
        "/ready",
        "/version",
        "/v1/models",
        "/v1/models/parrot",
        "/metrics",
        "/live",
        "/live/figures",
        "/",
    ):
        head = client.head(path)
        assert head.status_code == 200 and not head.content, "health checks often ask by HEAD"


def test_a_browser_may_send_a_key_as_a_password(make_client: MakeClient) -> None:
    client = make_client(api_key=KEYS)
    asked = client.get("/")
    assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic")
    assert client.get("/version").headers["www-authenticate"] == "Bearer", "no page's script makes a browser prompt"
    assert client.get("/", auth=("anybody", "second-key")).status_code == 200
    for wrong in (("first-key", ""), ("first-key", "x"), ("", "")):
        assert client.get("/", auth=wrong).status_code == 401
    for odd in ("Basic", "Basic !!", "Basic Zmlyc3Qta2V5", "Basic \xff"):
        assert client.get("/", headers={b"Authorization": odd.encode("latin-1")}).status_code == 401


def test_metrics_the_page_and_the_log_count_a_request(make_client: MakeClient) -> None:
    client = make_client(served_model_name=["shown"])
    before = client.get("/live/figures").json()["requests"]["finished"].get("stop", 0)
    assert client.post(PATH, json={"prompt": "x"}).status_code == 200
    assert client.get("/live/figures").json()["requests"]["finished"]["stop"] == before + 1
    assert 'headway:request_success_total{finished_reason="stop",model_name="shown"}' in client.get("/metrics").text
    assert client.get("/").headers["content-type"].startswith("text/html")


def test_a_name_pointed_at_this_machine_is_not_served(make_client: MakeClient) -> None:
    """DNS rebinding: a page of evil.example would otherwise be same-origin with a server that has no key."""
    client = make_client(allowed_hosts=[])
    assert error_of(client.get("/v1/models", headers={"Host": "evil.example:8000"}), 403)["code"] == "host"
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host


def test_no_cors_unless_asked(make_client: MakeClient) -> None:
    page = {"Origin": "https://a.example"}
    answer = make_client().get("/v1/models", headers=page)
    assert "access-control-allow-origin" not in answer.headers
    client = make_client(allowed_origins=["https://a.example"], api_key=KEYS)
    preflight = client.options(PATH, headers={**page, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 200, "browsers send it without a key"
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    other = client.get("/v1/models", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_request_ids_are_the_servers(make_client: MakeClient) -> None:
    client = make_client()
    mine = {"X-Request-Id": "mine"}
    ids = {client.get("/health", headers=mine).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3 and "mine" not in ids
    assert all(name.startswith("req-") for name in ids)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"prompt": "x"} {}', "JSON"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"\xff\xfe", "JSON"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "range"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 50 + b"}", "max_tokens"),
        (b'{"prompt": "x", "seed": 1' + b"0" * 50 + b"}", "seed"),
        (b'{"prompt": ' + b"[" * 100_000, "prompt"),
        (b'{"prompt": "x", "structured_outputs": {"json": ' + b'{"a":' * 50 + b"1" + b"}" * 52, "nested"),
        (b'{"prompt": "x", "structured_outputs": {"json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5002, "nested"),
        (b'{"prompt": {"a": 1}}', "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b"{}", "prompt"),
    ],
)
def test_malformed_bodies(make_client: MakeClient, content: bytes, words: str) -> None:
    answer = make_client().post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert words in error_of(answer)["message"]


def test_bodies_have_a_longest_length(make_client: MakeClient) -> None:
    client = make_client(max_body_bytes=2000)
    assert error_of(client.post(PATH, json={"prompt": "x" * 3000}), 413)["code"] == "body_size"

    def drip() -> Any:
        for _ in range(30):
            yield b" " * 100

    sent = client.post(PATH, content=drip(), headers={"Content-Type": "application/json"})
    assert error_of(sent, 413)["code"] == "body_size", "no Content-Length announced it"
    assert client.post(PATH, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("part", [b"[],", b"{},", b'{"a" :1},'])
def test_bodies_have_a_largest_number_of_parts(make_client: MakeClient, part: bytes) -> None:
    """Decoding what fits into the longest body may still take seconds, in which nobody else is served."""
    parts = part * (MAX_PARTS + 1)
    content = b'{"prompt": "x", "structured_outputs": {"json": {"enum": [' + parts[:-1] + b"]}}}"
    answer = make_client().post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert error_of(answer)["code"] == "body_size"
    ids = b'{"prompt": [' + b"1," * MAX_PARTS + b"1]}"
    answer = make_client().post(PATH, content=ids, headers={"Content-Type": "application/json"})
    assert "max_model_len" in error_of(answer)["message"], "numbers are no parts: they cost little"


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_bodies_any_web_page_could_send_are_refused(make_client: MakeClient, media: str) -> None:
    answer = make_client().post(PATH, content=b'{"prompt": "x"}', headers={"Content-Type": media})
    assert "application/json" in error_of(answer, 415)["message"]


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
def test_packed_bodies_are_refused_not_misread(make_client: MakeClient, coding: str) -> None:
    client = make_client()
    answer = client.post(PATH, json={"prompt": "x"}, headers={"Content-Encoding": coding})
    assert coding in error_of(answer, 415)["message"] and answer.headers["accept-encoding"] == "identity"
    assert client.post(PATH, json={"prompt": "x"}, headers={"Content-Encoding": "identity"}).status_code == 200


def test_unknown_routes_and_methods(make_client: MakeClient) -> None:
    client = make_client()
    error_of(client.get("/nope"), 404)
    error_of(client.get(PATH), 405)
    error_of(client.get("/v1/models/no/such"), 404)
    assert client.get("/v1/models/parrot").json()["max_model_len"] == 4096
    assert [m["id"] for m in make_client(served_model_name=["a", "b"]).get("/v1/models").json()["data"]] == ["a", "b"]


def test_an_unexpected_error_is_a_500_that_tells_nothing(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client()

    def broken(*_: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr("headway.server.completions.prompts_of", broken)
    answer = client.post(PATH, json={"prompt": "x"})
    error = error_of(answer, 500)
    assert "secret" not in error["message"]
    assert answer.headers["x-request-id"] in error["message"]
    assert answer.headers["x-request-id"] in caplog.text and "secret" in caplog.text


def test_more_than_one_request_may_hold(make_client: MakeClient) -> None:
    client = make_client(max_sequences=4)
    assert "max-sequences" in error_of(client.post(PATH, json={"prompt": ["a", "b", "c"], "n": 2}))["message"]
    assert len(client.post(PATH, json={"prompt": ["a", "b"], "n": 2}).json()["choices"]) == 4
    small = make_client(max_queue=0)
    assert "max-queue" in error_of(small.post(PATH, json={"prompt": "a", "n": 5}))["message"]
    assert len(small.post(PATH, json={"prompt": "a", "n": 4}).json()["choices"]) == 4


def test_the_queue_has_an_end_and_places_come_back() -> None:
    lifecycle = Lifecycle(Phase.READY)
    lifecycle.capacity = 3
    lifecycle.admit(2)
    with pytest.raises(Exception, match="queue is full") as refusal:
        lifecycle.admit(2)
    assert refusal.value.status == 429 and refusal.value.headers == {"Retry-After": "1"}  # type: ignore[attr-defined]
    lifecycle.admit(1)
    lifecycle.release(3)
    lifecycle.admit(3)


def test_log_lines_hold_figures_and_no_texts(make_client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    client = make_client()
    with caplog.at_level(logging.INFO, logger="headway.access"):
        client.post(PATH, json={"prompt": "private words"})
        client.get("/health")
    [record] = [r for r in caplog.records if r.name == "headway.access"]
    line = json.loads(JsonFormatter().format(record))
    assert (line["path"], line["status"], line["completion_tokens"], line["finish"]) == (PATH, 200, 14, "stop")
    assert "private" not in json.dumps(line) and "request_id=req-" in TextFormatter().format(record)


def test_a_path_cannot_forge_a_log_line(make_client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headway.access"):
        make_client().get("/x%0aINFO%20forged")
    [record] = [r for r in caplog.records if r.name == "headway.access"]
    assert len(TextFormatter().format(record).splitlines()) == 1
    assert len(JsonFormatter().format(record).splitlines()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": "8000"},
        {"max_body_bytes": 0},
        {"max_json_depth": 1000},
        {"api_key": ["short"]},
        {"api_key": "not-a-list"},
        {"shutdown_timeout": -1},
        {"template_timeout": 0},
        {"log_format": "xml"},
        {"tool_call_parser": "guess"},
        {"ssl_keyfile": __file__},
        {"ssl_keyfile": "/no/such", "ssl_certfile": "/no/such"},
        {"chat_template": "/no/such"},
        {"hots": "x"},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, TypeError)):
        ServerSettings(**wrong)
