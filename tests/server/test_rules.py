"""Rules that several routes share, each tried on every route; and tables of names and numbers against a list of their own."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headway.api.request_metrics import RequestMetrics
from headway.core.errors import InvalidRequestError
from headway.core.histogram import Histogram
from headway.core.messages import EngineStats
from headway.core.outputs import Logprob
from headway.server.call_reader import Arguments, CallReader, CallStart
from headway.server.errors import LONG_FIELDS, ApiError, as_api_error
from headway.server.media_fetch import check_url
from headway.server.messages import Addressed, for_template, input_messages
from headway.server.metrics import Figures
from headway.server.protocol import ChatMessage, InputItem
from headway.server.report import CompletionLogprobs
from headway.server.service import Service
from tests.engine.fake_core import model_info
from tests.server.test_chat import said

# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "shown"), [("user", "user"), ("system", "system"), ("developer", "system"), ("assistant",) * 2]
)
def test_templates_meet_the_same_roles_from_every_route(role: Any, shown: str) -> None:
    [chat] = for_template([ChatMessage(role=role, content="x")])
    [other] = input_messages(None, [InputItem(type="message", role=role, content="x")]).messages
    assert chat == other == {"role": shown, "content": "x"}


# -- calls ------------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [0, -1, 12.5, 1e300, True, False, None, "", "s}", '"', "\\", [], [1, "]}"], {}, {"a": {"b": [{}]}}]


@pytest.mark.parametrize("seed", range(8))
def test_a_call_is_read_whatever_stands_beside_it(seed: int) -> None:
    """Members of every kind of value before, between and behind the name and the arguments, in any spacing, cut anywhere."""
    rng = random.Random(seed)
    for _ in range(60):
        arguments = {f"k{i}": rng.choice(VALUES) for i in range(rng.randrange(3))}
        members = [("name", "f"), (rng.choice(["arguments", "parameters"]), arguments)]
        members += [(f"x{i}", rng.choice(VALUES)) for i in range(rng.randrange(3))]
        rng.shuffle(members)
        gap, colon = rng.choice([("", ""), (" ", " "), ("\n  ", " ")])
        text = "{" + ",".join(f"{gap}{json.dumps(n)}:{colon}{json.dumps(v)}" for n, v in members) + gap + "}"
        reader, pieces, places = CallReader(), [], sorted(rng.randrange(len(text) + 4) for _ in range(4))
        whole = text + "tail"
        rest = ""
        for begin, end in zip([0, *places], [*places, len(whole)], strict=True):
            found, left = reader.read(whole[begin:end])
            pieces += found
            rest += left
        assert [piece for piece in pieces if isinstance(piece, CallStart)] == [CallStart("f")], text
        read = "".join(piece.text for piece in pieces if isinstance(piece, Arguments))
        assert json.loads(read) == arguments and rest == "tail" and not reader.is_open, text


# -- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("asked", [None, False, True])
def test_alternatives_need_log_probabilities_however_few(
    client: TestClient, stream: bool, number: int, asked: Any
) -> None:
    answer = client.post("/v1/chat/completions", json=said("x", top_logprobs=number, logprobs=asked, stream=stream))
    assert answer.status_code == (200 if asked else 400), answer.text
    if not asked:
        assert answer.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("field", [*sorted(LONG_FIELDS | {"min_tokens", "max_tokens", "logprobs", "n"}), None])
def test_only_texts_are_told_to_be_too_long(field: str | None) -> None:
    for words, is_long in (("max_model_len is 32", True), ("something else", False)):
        error = as_api_error(InvalidRequestError(f"it does not fit: {words}", field))
        assert isinstance(error, ApiError) and (error.status, error.param) == (400, field)
        assert (error.code == "context_length_exceeded") == (is_long and field in LONG_FIELDS)


@pytest.mark.parametrize("most", [1, 3])
def test_as_many_images_as_are_allowed(most: int) -> None:
    service: Any = SimpleNamespace(
        llm=SimpleNamespace(pictures=SimpleNamespace(kinds=("image",), limits={"image": most, "audio": 0})),
        settings=None,
        names=["m"],
    )
    image: Any = Addressed("data:image/png;base64,", "x")
    for number in range(most + 1):
        Service.check_media(service, [image] * number)
    with pytest.raises(ApiError, match=f"at most {most} images may be sent, got {most + 1}"):
        Service.check_media(service, [image] * (most + 1))


HOSTS = {"example.org": {"example.org"}, ".example.org": {"a.example.org", "a.b.example.org"}, "A.test": {"a.test"}}
"""A domain that is allowed, and the hosts that it allows."""


@pytest.mark.parametrize("domain", HOSTS)
def test_which_hosts_a_domain_allows(domain: str) -> None:
    near = {"evilexample.org", "example.org.evil", "example.orgx", "xa.test", "b.a.test", "org", "xample.org"}
    for host in near.union(*HOSTS.values()):
        if host in HOSTS[domain]:
            assert check_url(f"http://{host}/x", [domain], "field").host == host
            assert check_url(f"https://{host.upper()}.:8443/x?y", ["other.test", domain], "field").port == 8443
        else:
            with pytest.raises(ApiError, match="is not among"):
                check_url(f"http://{host}/x", [domain], "field")


def test_offsets_count_characters_of_tokens_of_several_bytes() -> None:
    whole: Any = SimpleNamespace(
        token_text=lambda token: {7: "aä", 8: "€", 9: ""}.get(token, "x"),
        token_bytes=lambda token: {7: "aä", 8: "€", 9: ""}.get(token, "x").encode(),
    )
    ids, writer, offsets = [7, 8, 9, 1, 8], CompletionLogprobs(whole), list[int]()
    for cut in (ids[:2], ids[2:]):  # chunks of a stream
        rows: Any = [{token: Logprob(-1.0, 1, None)} for token in cut]
        offsets += writer.body(cut, rows)["text_offset"]
    assert offsets == [0, 2, 3, 3, 4] and "".join(map(whole.token_text, ids)) == "aä€x€"


# -- figures ----------------------------------------------------------------------------------------------------------

OF_STATS = {
    "num_requests_running": "num_running", "num_requests_waiting": "num_waiting", "kv_cache_usage_perc": "kv_cache_usage",
    "run_ahead_depth": "run_ahead", "num_steps_in_flight": "num_in_flight", "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits", "num_preemptions": "num_preemptions", "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens", "steps": "num_steps", "graph_steps": "num_graph_steps",
    "host_schedule_seconds": "schedule_seconds", "host_launch_seconds": "launch_seconds",
    "host_apply_seconds": "apply_seconds", "device_busy_seconds": "device_busy_seconds",
    "device_idle_seconds": "device_idle_seconds", "timed_steps": "num_timed_steps", "dry_steps": "num_dry_steps",
    "spec_decode_num_drafts": "num_drafts", "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens", "spec_decode_time_saved_seconds": "draft_saved_seconds",
    "iteration_tokens_total": "tokens_per_step", "iteration_rows": "rows_per_step", "host_step_seconds": "host_step_seconds",
    "headway_seconds": "headway_seconds", "device_step_seconds": "device_step_seconds",
}  # fmt: skip
OF_REQUESTS = {
    "time_to_first_token_seconds": "first_token", "inter_token_latency_seconds": "next_token",
    "request_time_per_output_token_seconds": "per_token", "e2e_request_latency_seconds": "whole",
    "request_queue_time_seconds": "queue", "request_prefill_time_seconds": "prefill",
    "request_decode_time_seconds": "decode", "request_inference_time_seconds": "inference",
    "request_prompt_tokens": "prompt_tokens", "request_generation_tokens": "generation_tokens",
    "request_params_max_tokens": "max_tokens", "request_params_n": "n",
}  # fmt: skip


def test_every_figure_shows_its_own_number() -> None:
    """All numbers differ, so that none can stand in for another."""
    stats, requests = EngineStats(has_device_clock=True), RequestMetrics(1000)
    stats.num_accepted_tokens_per_pos = [5, 4]
    wanted: dict[str, float] = {}
    for number, (name, field) in enumerate(OF_STATS.items(), 101):
        held = getattr(stats, field)
        if isinstance(held, Histogram):
            setattr(stats, field, counted := Histogram.over((1000.0,)))
            counted.observe(float(number))
            wanted[f"{name}_sum"] = number
        else:
            setattr(stats, field, type(held)(number))
            wanted[name] = number
    for number, (name, field) in enumerate(OF_REQUESTS.items(), 501):
        getattr(requests, field).observe(float(number))
        wanted[f"{name}_sum"] = number
    found: dict[str, float] = {}
    for family in Figures("m", model_info(64), requests, stats).collect():
        for sample in family.samples:
            if {*sample.labels} <= {"model_name"}:
                found[sample.name.removeprefix("headway:").removesuffix("_total")] = sample.value
    del found["engine_up"]
    assert {name: value for name, value in found.items() if not name.endswith(("_count", "_created"))} == {
        name.removesuffix("_total"): value for name, value in wanted.items()
    }
