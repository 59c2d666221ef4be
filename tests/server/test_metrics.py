"""GET /metrics: well-formed, vLLM's names, numbers that match what happened, and an answer whatever the engine does."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from headway import AsyncLLM, EngineDeadError, SamplingParams
from headway.api.request_metrics import RequestMetrics
from headway.core.histogram import Histogram
from headway.core.messages import EngineStats
from headway.server import metrics
from headway.server.metrics import Figures
from headway.server.metrics_source import StatsSource, served_name
from tests.api import fakes
from tests.engine import fake_core
from tests.house.source import ROOT
from tests.server.serving import client_of

VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "iteration_tokens_total_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
]
"""Samples that dashboards made for vLLM read, without their prefix."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """(name, labels without the model's) -> value; every sample must carry the model's name."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("headway:"):
                assert labels.pop("model_name") == "tiny"
            key = (sample.name, frozenset(labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[f"headway:{name}", frozenset(labels.items())]


def serve(monkeypatch: pytest.MonkeyPatch, body: Callable[[AsyncLLM, httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run ``body`` against /metrics over the fake engine."""
    fakes.install(monkeypatch)

    async def main() -> None:
        async with AsyncLLM("fake", multiprocess=False) as llm:
            app = FastAPI()
            metrics.install(app, llm, SimpleNamespace(served_model_name=["tiny"]))
            async with client_of(app) as client:
                await body(llm, client)

    asyncio.run(main())


async def ask(llm: AsyncLLM, tokens: int, **fields: Any) -> None:
    async for _ in llm.generate("abc", SamplingParams(seed=0, max_tokens=tokens, **fields)):
        pass


def test_requests_appear_in_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        before = samples((await client.get("/metrics")).text)
        assert value(before, "request_success_total", finished_reason="length") == 0
        await asyncio.gather(ask(llm, 5), ask(llm, 7, n=2))
        async with aclosing(llm.generate("abc", SamplingParams(seed=0, max_tokens=None))) as endless:  # type: ignore[type-var]
            async for _ in endless:
                break
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        after = samples(response.text)
        assert value(after, "request_success_total", finished_reason="length") == 3
        assert value(after, "request_success_total", finished_reason="abort") == 1
        assert value(after, "request_generation_tokens_sum") >= 5 + 14
        assert value(after, "request_generation_tokens_bucket", le="5.0") >= 1
        assert value(after, "e2e_request_latency_seconds_count") == 4
        assert value(after, "time_to_first_token_seconds_bucket", le="+Inf") == 4
        assert value(after, "engine_up") == 1
        assert 0 < value(after, "steps_total") <= (await llm.stats()).num_steps
        assert ("process_cpu_seconds_total", frozenset[tuple[str, str]]()) in after

    serve(monkeypatch, body)


def test_openmetrics_is_given_to_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        await ask(llm, 2)
        response = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        names = {family.name for family in parse_openmetrics(response.text)}  # type: ignore[no-untyped-call]
        assert "headway:prompt_tokens" in names

    serve(monkeypatch, body)


def test_a_dead_engine_is_a_figure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        with pytest.raises(EngineDeadError):
            async for _ in llm.generate({"prompt_token_ids": [fake_core.CRASH]}):
                pass
        response = await client.get("/metrics")
        assert response.status_code == 200
        found = samples(response.text)
        assert value(found, "engine_up") == 0
        assert not any(name == "headway:num_requests_running" for name, _ in found)
        assert value(found, "request_success_total", finished_reason="abort") == 1

    serve(monkeypatch, body)


def full_stats() -> EngineStats:
    """Every histogram filled, with a device clock."""
    stats = EngineStats(num_running=3, has_device_clock=True, waits={"back_pressure": 4, "unpinned_copy": 0})
    stats.wait_seconds = {"back_pressure": 0.5, "unpinned_copy": 0.0}
    stats.host_waits = {"item": 2}
    for field in EngineStats.__struct_fields__:
        if isinstance(getattr(stats, field), Histogram):
            setattr(stats, field, Histogram((0.001, 0.25, 1.0), [1, 0, 2, 3], 9.5))
    return stats


def text_of(stats: EngineStats | None) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Figures("tiny", fake_core.model_info(), RequestMetrics(100), stats))
    return generate_latest(registry).decode()


def test_every_name_vllm_dashboards_read_is_there() -> None:
    names = {name for name, _ in samples(text_of(full_stats()))}
    assert {f"headway:{name}" for name in VLLM_NAMES} <= names


def test_buckets_are_cumulative_and_waits_have_reasons() -> None:
    found = samples(text_of(full_stats()))
    counts = [value(found, "headway_seconds_bucket", le=le) for le in ("0.001", "0.25", "1.0", "+Inf")]
    assert counts == [1, 1, 3, 6]
    assert value(found, "headway_seconds_sum") == 9.5 and value(found, "headway_seconds_count") == 6
    assert value(found, "host_waits_total", reason="back_pressure") == 4
    assert value(found, "host_wait_seconds_total", reason="back_pressure") == 0.5
    assert value(found, "unsanctioned_host_waits_total", kind="item") == 2
    assert "unsanctioned" not in text_of(EngineStats()), "nobody counts them here"


def test_a_device_without_a_clock_claims_nothing() -> None:
    names = {name for name, _ in samples(text_of(EngineStats()))}
    assert not any("device" in name or "headway_seconds" in name for name in names)


def test_every_figure_of_the_engine_is_published() -> None:
    """A field added to EngineStats must get a metric, or a place in this list with a reason."""
    rows: tuple[tuple[str, str, str], ...] = (
        metrics.GAUGES + metrics.COUNTERS + metrics.DEVICE_COUNTERS + metrics.HISTOGRAMS + metrics.DEVICE_HISTOGRAMS
    )
    rows += metrics.DRAFT_COUNTERS + metrics.DRAFT_GAUGES
    published = {field for _, field, _ in rows} | {"waits", "wait_seconds", "host_waits", "num_accepted_tokens_per_pos"}
    elsewhere = {"back_pressure_waits", "back_pressure_seconds"}  # a reason of waits
    elsewhere |= {"has_device_clock", "recent_steps"}  # decides what is shown; for the live page
    elsewhere |= {"replicas"}  # a gauge of each, replica_*
    assert set(EngineStats.__struct_fields__) == published | elsewhere
    request_fields = {name for name, kept in vars(RequestMetrics(10)).items() if isinstance(kept, Histogram)}
    assert request_fields == {field for _, field, _ in metrics.REQUEST_HISTOGRAMS}


def test_every_metric_is_documented() -> None:
    document = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", document))
    base = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name, _ in samples(text_of(full_stats()))}
    assert {name.removeprefix("headway:") for name in base} <= documented


class SlowEngine:
    """Answers when told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = threading.Event()

    async def stats(self) -> EngineStats:
        self.asked += 1
        await asyncio.to_thread(self.go.wait)
        return EngineStats(num_steps=self.asked)


def test_askers_share_one_question_and_do_not_wait_for_ever() -> None:
    async def main() -> None:
        engine = SlowEngine()
        source = StatsSource(cast(AsyncLLM, engine), patience=0.01)
        assert await asyncio.gather(*(source.read() for _ in range(20))) == [None] * 20
        engine.go.set()
        source._patience = 30
        answers = await asyncio.gather(*(source.read() for _ in range(20)))
        assert engine.asked == 1 and all(answer is answers[0] is not None for answer in answers)
        assert await source.read() is not answers[0] and engine.asked == 2

    asyncio.run(main())


def test_the_label_is_the_first_served_name() -> None:
    llm = cast(AsyncLLM, SimpleNamespace(model_info=fake_core.model_info()))
    assert served_name(llm, SimpleNamespace(served_model_name=["a", "b"])) == "a"
    assert served_name(llm, SimpleNamespace(served_model_name=[])) == served_name(llm, None) == "fake"


def test_drafts_are_published_where_some_are_made() -> None:
    stats = EngineStats(num_drafts=4, num_draft_tokens=8, num_accepted_tokens=5, num_accepted_tokens_per_pos=[3, 2])
    stats.draft_saved_seconds = -0.5
    found = samples(text_of(stats))
    assert value(found, "spec_decode_num_drafts_total") == 4
    assert value(found, "spec_decode_num_accepted_tokens_per_pos_total", position="0") == 3
    assert value(found, "spec_decode_num_accepted_tokens_per_pos_total", position="1") == 2
    assert value(found, "spec_decode_time_saved_seconds") == -0.5, "drafts that cost more than they bring"
    assert "spec_decode" not in text_of(EngineStats())
