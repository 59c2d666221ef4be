"""Spans of requests: what they say, whose trace they join, how they reach a collector."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from headway import AsyncLLM, ConfigError, SamplingParams
from headway.core.task import Task
from headway.server import tracing
from headway.server.app import build_app
from headway.server.settings import ServerSettings
from tests.api import fakes
from tests.engine import fake_core
from tests.server.pooling_app import pooling_llm
from tests.server.serving import client_of, make_app

CHAT = {"model": "tiny", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "a secret"}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
needs_otel = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None,
    reason="the extra otel is not installed",
)


def traced(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[AsyncLLM, httpx.AsyncClient], Awaitable[None]]
) -> list[Any]:
    """Run ``body`` against a traced app; the spans it made."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    fakes.install(monkeypatch)
    kept = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda endpoint: kept)

    async def main() -> None:
        async with AsyncLLM("fake", multiprocess=False) as llm:
            app = make_app(llm)
            close = tracing.install(
                app, llm, SimpleNamespace(served_model_name=["tiny"], otlp_traces_endpoint="http://x")
            )
            async with client_of(app) as client:
                await body(llm, client)
            close()

    asyncio.run(main())
    return list(kept.get_finished_spans())


@needs_otel
def test_a_span_tells_sizes_times_and_the_end_but_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200

    [span] = traced(monkeypatch, body)
    assert span.name == "llm_request" and span.kind.name == "SERVER" and span.parent is None
    said = dict(span.attributes)
    assert said["gen_ai.request.model"] == "tiny" and said["gen_ai.request.max_tokens"] == 4
    assert said["gen_ai.usage.completion_tokens"] == said["gen_ai.usage.output_tokens"] == 4
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert 0 <= said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]
    assert span.end_time - span.start_time == pytest.approx(said["gen_ai.latency.e2e"] * 1e9, abs=1e4)
    assert span.resource.attributes["service.name"] == "headway"
    assert "secret" not in str(said)


def completion(first: float | None, last: float | None, queued: float | None, end: str | None) -> Any:
    """One answer of a request."""
    return SimpleNamespace(first_token_at=first, last_token_at=last, queue_seconds=queued, finish_reason=end)


def test_each_figure_of_a_span_is_the_one_that_its_name_says() -> None:
    """Of several answers that begin and end at different times, one of which gives nothing."""
    params = SamplingParams(max_tokens=7, temperature=0.5, top_p=0.25)
    request: Any = SimpleNamespace(
        prepared=SimpleNamespace(params=params, prompt_token_ids=[1, 2, 3]), request_id="r", arrived=100.0,
        num_generated=11, completions=[completion(104.0, 120.0, 1.5, "stop"), completion(109.0, 132.0, 2.5, "length"),
                                       completion(None, None, None, None)],
    )  # fmt: skip
    said = tracing.attributes(request, "tiny", 164.0)
    assert {name.removeprefix("gen_ai."): value for name, value in said.items()} == {
        "provider.name": "headway", "request.model": "tiny", "response.model": "tiny", "request.id": "r", "request.n": 3,
        "request.max_tokens": 7, "request.temperature": 0.5, "request.top_p": 0.25,
        "response.finish_reasons": ["stop", "length", "error"], "usage.input_tokens": 3, "usage.output_tokens": 11,
        "usage.prompt_tokens": 3, "usage.completion_tokens": 11, "latency.e2e": 64.0, "latency.time_in_queue": 1.5,
        "latency.time_to_first_token": 4.0, "latency.time_in_model_decode": 28.0, "latency.time_in_model_prefill": 2.5,
        "latency.time_in_model_inference": 30.5,
    }  # fmt: skip
    request.completions = [completion(104.0, 120.0, None, "stop")]
    named = {name for name in tracing.attributes(request, "tiny", 164.0) if "latency" in name}
    assert named == {f"gen_ai.latency.{name}" for name in ("e2e", "time_to_first_token", "time_in_model_decode")}


@pytest.mark.parametrize(
    ("aborted", "error", "end"), [(True, "x", "abort"), (False, "x", "error"), (False, None, "stop")]
)
def test_each_figure_of_a_span_of_texts_is_the_one_that_its_name_says(
    aborted: bool, error: str | None, end: str
) -> None:
    group: Any = SimpleNamespace(
        wanted=SimpleNamespace(task=Task.EMBED), request_id="r", messages=["a", "b"], aborted=aborted, error=error,
        num_tokens=9, arrived=100.0, queue_seconds=1.5,
    )  # fmt: skip
    assert tracing.pooling_attributes(group, "tiny", 164.0) == {
        "gen_ai.provider.name": "headway", "gen_ai.operation.name": "embeddings", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.request.id": "r", "gen_ai.request.n": 2,
        "gen_ai.response.finish_reasons": [end], "gen_ai.usage.input_tokens": 9, "gen_ai.usage.prompt_tokens": 9,
        "gen_ai.latency.e2e": 64.0, "gen_ai.latency.time_in_queue": 1.5,
    }  # fmt: skip


@needs_otel
def test_texts_that_pool_are_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda endpoint: kept)
    llm = pooling_llm("embed")

    async def main() -> None:
        app = build_app(llm, ServerSettings(allowed_hosts=["*"], otlp_traces_endpoint="http://x"))
        async with client_of(app) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            for texts in (["w1", "w2 w3"], ["w1", "fail"]):
                await client.post("/v1/embeddings", json={"input": texts}, headers=headers)
        llm.request_metrics.observer.close()  # type: ignore[union-attr]

    try:
        asyncio.run(main())
    finally:
        llm.shutdown()
    good, bad = (dict(span.attributes or {}) for span in kept.get_finished_spans())
    assert good["gen_ai.operation.name"] == "embeddings" and good["gen_ai.request.n"] == 2
    assert good["gen_ai.usage.input_tokens"] == 7 and good["gen_ai.response.finish_reasons"] == ("stop",)
    assert good["gen_ai.latency.e2e"] > 0 and bad["gen_ai.response.finish_reasons"] == ("error",)
    assert all(f"{span.context.trace_id:032x}" == TRACE for span in kept.get_finished_spans() if span.context)


@needs_otel
def test_a_request_joins_the_trace_of_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        for flags in ("01", "00"):  # the second sender does not want its trace kept
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": "nonsense"})

    joined, alone = traced(monkeypatch, body)
    assert f"{joined.context.trace_id:032x}" == TRACE and f"{joined.parent.span_id:016x}" == PARENT
    assert f"{alone.context.trace_id:032x}" != TRACE and alone.parent is None


@needs_otel
def test_errors_and_several_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
        async for _ in llm.generate({"prompt_token_ids": [fake_core.FAIL]}):
            pass
        async for _ in llm.generate("ab", SamplingParams(seed=0, n=3, max_tokens=2)):
            pass

    failed, several = traced(monkeypatch, body)
    assert failed.status.status_code.name == "ERROR" and failed.status.description == "failure asked for"
    assert "gen_ai.latency.time_to_first_token" not in failed.attributes
    assert several.attributes["gen_ai.request.n"] == 3 and several.attributes["gen_ai.usage.output_tokens"] == 6
    assert several.attributes["gen_ai.response.finish_reasons"] == ("length",) * 3


@needs_otel
def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
            pass

    fakes.install(monkeypatch)
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    async def main() -> None:
        async with AsyncLLM("fake", multiprocess=False) as llm:
            endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
            close = tracing.install(FastAPI(), llm, SimpleNamespace(otlp_traces_endpoint=endpoint))
            async for _ in llm.generate("ab", SamplingParams(seed=0, max_tokens=2)):
                pass
            await asyncio.to_thread(close)

    try:
        asyncio.run(main())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    [sent] = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    [span] = sent.resource_spans[0].scope_spans[0].spans
    assert span.name == "llm_request"
    assert not [t for t in threading.enumerate() if "Otel" in t.name], "the sender's thread is gone"


def test_nothing_is_traced_or_imported_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch)
    monkeypatch.setattr(tracing, "Tracing", None)
    llm = AsyncLLM("fake", multiprocess=False)
    try:
        tracing.install(FastAPI(), llm, SimpleNamespace(otlp_traces_endpoint=None))()
        tracing.install(FastAPI(), llm, object())()
        assert llm.request_metrics.observer is None
    finally:
        llm.shutdown()


@pytest.mark.parametrize("endpoint", ["localhost:4317", "file:///etc/passwd", "http://", ""])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318/v1/traces"):
        tracing.otlp_exporter(endpoint)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[otel\]'"):
        tracing.otlp_exporter("http://localhost:4318/v1/traces")
