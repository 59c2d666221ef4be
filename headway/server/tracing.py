"""A span for each request, sent to an OpenTelemetry collector; only where ``--otlp-traces-endpoint`` asks for it.

Spans carry the names of the semantic conventions for generative AI and those that vLLM uses beside them; no text of prompts
or answers. A request that brings a ``traceparent`` header continues that trace, or is left out if its sender left it out.
Spans are sent by a thread of the library, in batches; when its queue of 2,048 is full, spans are dropped. Needs the extra
``otel``; nothing of it is imported otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from headway import __version__
from headway.api.async_llm import AsyncLLM
from headway.api.pooling.requests import OpenPooling
from headway.core.errors import ConfigError
from headway.core.task import Task
from headway.server.metrics_source import served_name

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from headway.api.output_processor import OpenRequest

SPAN_NAME = "llm_request"
TRACE_HEADERS = (b"traceparent", b"tracestate")


def install(app: FastAPI, llm: AsyncLLM, settings: object) -> Callable[[], None]:
    """Trace the requests of ``app`` if ``settings.otlp_traces_endpoint`` is set; before the app takes requests.

    Returns:
        What must be called when the app ends: it sends what is left and stops the sender's thread.

    Raises:
        ConfigError: the endpoint is no http address, or the extra is not installed.
    """
    endpoint = getattr(settings, "otlp_traces_endpoint", None)
    if endpoint is None:
        return _nothing
    tracing = Tracing(served_name(llm, settings), otlp_exporter(endpoint))
    llm.request_metrics.observer = tracing
    app.add_middleware(TraceContext)
    return tracing.close


def _nothing() -> None:
    """There is nothing to close."""


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends protobuf over HTTP to ``endpoint``, the whole address (a collector's usually ends in :4318/v1/traces)."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: it must be an address as in http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); pip install 'headway[otel]'"
        ) from None
    return OTLPSpanExporter(endpoint=endpoint)


class Tracing:
    """Makes spans of requests as they end. See ``api.request_metrics.RequestObserver``.

    Args:
        exporter: where finished spans go.
    """

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        from opentelemetry import context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model_name = model_name
        self._current = context.get_current
        self._provider = TracerProvider(resource=Resource.create({"service.name": "headway"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headway", __version__)

    def opened(self) -> object:
        """The context that the request came in."""
        return self._current()

    def ended(self, request: OpenRequest | OpenPooling, now: float) -> None:
        """Make the request's span."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time_ns()
        start = end - int((now - request.arrived) * 1e9)
        span = self._tracer.start_span(
            SPAN_NAME,
            context=request.trace,
            kind=SpanKind.SERVER,
            start_time=start,
            attributes=(
                pooling_attributes(request, self._model_name, now)
                if isinstance(request, OpenPooling)
                else attributes(request, self._model_name, now)
            ),
        )
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(end)

    def flush(self) -> None:
        """Send what is waiting, and return when it is sent."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what is waiting and stop."""
        self._provider.shutdown()


def attributes(request: OpenRequest, model_name: str, now: float) -> dict[str, Any]:
    """What a span says of a request; times in seconds. What did not happen is left out."""
    params = request.prepared.params
    completions = request.completions
    num_prompt = len(request.prepared.prompt_token_ids)
    firsts = [c.first_token_at for c in completions if c.first_token_at is not None]
    lasts = [c.last_token_at for c in completions if c.last_token_at is not None]
    found: dict[str, Any] = {
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": len(completions),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": [c.finish_reason or "error" for c in completions],
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": request.num_generated,
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": request.num_generated,
        "gen_ai.latency.e2e": now - request.arrived,
        "gen_ai.latency.time_in_queue": completions[0].queue_seconds,
    }
    if firsts:
        found["gen_ai.latency.time_to_first_token"] = min(firsts) - request.arrived
        found["gen_ai.latency.time_in_model_decode"] = max(lasts) - min(firsts)
    if firsts and completions[0].queue_seconds is not None:
        found["gen_ai.latency.time_in_model_prefill"] = min(firsts) - request.arrived - completions[0].queue_seconds
        found["gen_ai.latency.time_in_model_inference"] = max(lasts) - request.arrived - completions[0].queue_seconds
    return {name: value for name, value in found.items() if value is not None}


def pooling_attributes(group: OpenPooling, model_name: str, now: float) -> dict[str, Any]:
    """The same of a request that pools, which may have several texts."""
    found: dict[str, Any] = {
        "gen_ai.provider.name": "headway",
        "gen_ai.operation.name": "embeddings" if group.wanted.task is Task.EMBED else group.wanted.task.value,
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": group.request_id,
        "gen_ai.request.n": len(group.messages),
        "gen_ai.response.finish_reasons": [
            "abort" if group.aborted else "error" if group.error is not None else "stop"
        ],
        "gen_ai.usage.input_tokens": group.num_tokens,
        "gen_ai.usage.prompt_tokens": group.num_tokens,
        "gen_ai.latency.e2e": now - group.arrived,
        "gen_ai.latency.time_in_queue": group.queue_seconds,
    }
    return {name: value for name, value in found.items() if value is not None}


class TraceContext:
    """Middleware: what runs for a request runs in the trace that its headers name."""

    def __init__(self, app: ASGIApp) -> None:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._context, self._headers = app, context, TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in TRACE_HEADERS}
        token = self._context.attach(self._headers.extract(sent))
        try:
            await self._app(scope, receive, send)
        finally:
            self._context.detach(token)
