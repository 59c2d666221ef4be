"""``GET /metrics``: Prometheus' text format, under vLLM's names with the prefix ``headway:``.

Nothing is kept here. Both sides count in plain numbers as they go (``engine.metrics``, ``api.request_metrics``); a scrape
reads them and writes the page. docs/metrics.md explains every name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headway import __version__
from headway.api.async_llm import AsyncLLM
from headway.api.request_metrics import RequestMetrics
from headway.core.histogram import Histogram
from headway.core.messages import EngineStats, ModelInfo
from headway.server.health import shared_health
from headway.server.metrics_source import served_name, shared_source

PREFIX = "headway:"
LABEL = "model_name"
Row = tuple[str, str, str]
"""Metric without its prefix, field of EngineStats (of RequestMetrics in REQUEST_HISTOGRAMS), help."""

GAUGES = (
    ("num_requests_running", "num_running", "Requests in execution."),
    ("num_requests_waiting", "num_waiting", "Requests waiting to be scheduled."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of the KV cache in use; 1 is all of it."),
    ("run_ahead_depth", "run_ahead", "Steps that may be in flight when the host awaits a result."),
    ("num_steps_in_flight", "num_in_flight", "Steps launched whose results have not been applied."),
)
REPLICAS = (
    ("replica_requests_running", "num_running", "Requests in execution, by replica."),
    ("replica_requests_waiting", "num_waiting", "Requests waiting to be scheduled, by replica."),
    ("replica_kv_cache_usage_perc", "kv_cache_usage", "Share of a replica's KV cache in use."),
    ("replica_generated_tokens", "generation_tokens", "Tokens a replica has generated."),
)
"""Where there are several."""
COUNTERS = (
    ("prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
    ("num_preemptions", "num_preemptions", "Requests preempted for want of KV blocks."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("steps", "num_steps", "Steps launched."),
    (
        "graph_steps",
        "num_graph_steps",
        "Steps that ran as a captured graph; the others were launched kernel by kernel.",
    ),
    ("host_schedule_seconds", "schedule_seconds", "Host time spent on scheduling steps."),
    ("host_launch_seconds", "launch_seconds", "Host time spent on packing and launching steps."),
    ("host_apply_seconds", "apply_seconds", "Host time spent on applying results."),
)
DEVICE_COUNTERS = (
    ("device_busy_seconds", "device_busy_seconds", "Device time spent on steps."),
    ("device_idle_seconds", "device_idle_seconds", "Time the device stood idle between steps although there was work."),
    ("timed_steps", "num_timed_steps", "Steps whose headway was measured."),
    ("dry_steps", "num_dry_steps", "Measured steps that found the device idle: their headway was zero."),
)
DRAFT_COUNTERS = (
    ("spec_decode_num_drafts", "num_drafts", "Rows of drafts that were verified."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Drafts that were verified."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Drafts that became tokens."),
)
DRAFT_GAUGES = (
    (
        "spec_decode_time_saved_seconds",
        "draft_saved_seconds",
        "Time that drafts saved, by the times of steps without; less than zero: what they cost.",
    ),
)
HISTOGRAMS = (
    ("iteration_tokens_total", "tokens_per_step", "Tokens in a step."),
    ("iteration_rows", "rows_per_step", "Rows (requests) in a step."),
    ("host_step_seconds", "host_step_seconds", "The host's own time for a step: schedule, launch, apply."),
)
DEVICE_HISTOGRAMS = (
    ("headway_seconds", "headway_seconds", "Device work still queued when a step was submitted; zero: it had run dry."),
    ("device_step_seconds", "device_step_seconds", "A step's time on the device."),
)
REQUEST_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token", "From a request's arrival to its first token."),
    ("inter_token_latency_seconds", "next_token", "Between a request's deliveries of tokens."),
    ("request_time_per_output_token_seconds", "per_token", "Decode time of a request per token after its first."),
    ("e2e_request_latency_seconds", "whole", "From a request's arrival to its end."),
    ("request_queue_time_seconds", "queue", "From arrival at the engine to the first step with the request."),
    ("request_prefill_time_seconds", "prefill", "From there to the first token."),
    ("request_decode_time_seconds", "decode", "From the first token to the last."),
    ("request_inference_time_seconds", "inference", "From the first step with the request to its last token."),
    ("request_prompt_tokens", "prompt_tokens", "Prompt tokens of a request."),
    ("request_generation_tokens", "generation_tokens", "Tokens generated for a request."),
    ("request_params_max_tokens", "max_tokens", "max_tokens of a request."),
    ("request_params_n", "n", "n of a request."),
)


def install(app: FastAPI, llm: AsyncLLM, settings: object) -> None:
    """Add ``GET /metrics``. It answers while the engine is dead too, with ``headway:engine_up 0``."""
    source, name, health = shared_source(app, llm), served_name(llm, settings), shared_health(app, llm)

    async def metrics(request: Request) -> Response:
        stats = await source.read()
        up = stats is not None or (llm.dead_error is None and await health.answers())
        figures = Figures(name, llm.model_info, llm.request_metrics, stats, up)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(figures)
        ProcessCollector(registry=registry)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response, summary="Prometheus metrics")


class Figures(Collector):
    """What one scrape sees.

    Args:
        model_name: value of the label every metric has.
        stats: None when the engine does not answer; its metrics are then left out.
        up: whether it answers, or works and will; None: whether there are stats.
    """

    def __init__(
        self,
        model_name: str,
        info: ModelInfo,
        requests: RequestMetrics,
        stats: EngineStats | None,
        up: bool | None = None,
    ) -> None:
        self._name, self._info, self._requests, self._stats, self._up = (
            model_name,
            info,
            requests,
            stats,
            stats is not None if up is None else up,
        )

    def collect(self) -> Iterator[Metric]:
        """Every metric with its samples."""
        yield self._gauge("engine_up", "Whether the engine answers.", float(self._up))
        yield self._about()
        yield self._by("request_success", "Requests ended, by reason.", "finished_reason", self._requests.finished)
        if self._info.tasks[0].pools:
            yield self._by("pooling_requests", "Requests ended that pool, by task.", "task", self._requests.tasks)
        for metric, field, help_text in REQUEST_HISTOGRAMS:
            yield self._histogram(metric, help_text, getattr(self._requests, field))
        if self._stats is not None:
            yield from self._engine(self._stats)

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        accepted = {str(place): number for place, number in enumerate(stats.num_accepted_tokens_per_pos)}
        for metric, field, help_text in GAUGES + (DRAFT_GAUGES if accepted else ()):
            yield self._gauge(metric, help_text, getattr(stats, field))
        counters: tuple[Row, ...] = COUNTERS
        histograms: tuple[Row, ...] = HISTOGRAMS
        if stats.has_device_clock:
            counters, histograms = counters + DEVICE_COUNTERS, histograms + DEVICE_HISTOGRAMS
        if accepted:
            counters += DRAFT_COUNTERS
            help_text = "Drafts that became tokens, by their place in the row."
            yield self._by("spec_decode_num_accepted_tokens_per_pos", help_text, "position", accepted)
        for metric, field, help_text in counters:
            yield self._by(metric, help_text, None, {"": getattr(stats, field)})
        for metric, field, help_text in histograms:
            yield self._histogram(metric, help_text, getattr(stats, field))
        yield self._by("host_waits", "Times the host waited for the device in a step.", "reason", stats.waits)
        yield self._by("host_wait_seconds", "Time the host waited for the device.", "reason", stats.wait_seconds)
        for metric, field, help_text in REPLICAS if stats.replicas else ():
            family = GaugeMetricFamily(PREFIX + metric, help_text, labels=[LABEL, "replica"])
            for nth, replica in enumerate(stats.replicas):
                family.add_metric([self._name, str(nth)], getattr(replica, field))
            yield family
        if stats.host_waits is not None:
            help_text = "Unexpected host waits in steps, where they are counted."
            yield self._by("unsanctioned_host_waits", help_text, "kind", stats.host_waits)

    def _gauge(self, metric: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + metric, help_text, labels=[LABEL])
        family.add_metric([self._name], value)
        return family

    def _about(self) -> Metric:
        info = self._info
        facts = {
            "version": __version__,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "device": info.device,
            "max_model_len": str(info.max_model_len),
            "max_num_seqs": str(info.max_num_seqs),
            "num_kv_tokens": str(info.num_kv_tokens),
        }
        family = GaugeMetricFamily(PREFIX + "engine_info", "The engine as started.", labels=[LABEL, *facts])
        family.add_metric([self._name, *facts.values()], 1.0)
        return family

    def _by(self, metric: str, help_text: str, label: str | None, values: dict[str, int] | dict[str, float]) -> Metric:
        """A counter, with one sample for each value of ``label``."""
        family = CounterMetricFamily(PREFIX + metric, help_text, labels=[LABEL] if label is None else [LABEL, label])
        for key, value in values.items():
            family.add_metric([self._name] if label is None else [self._name, key], value)
        return family

    def _histogram(self, metric: str, help_text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + metric, help_text, labels=[LABEL])
        family.add_metric([self._name], buckets=_buckets(histogram), sum_value=histogram.total)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts as Prometheus wants them."""
    bounds: Iterable[float] = (*histogram.bounds, float("inf"))
    counts = histogram.counts or [0]
    return [(_number(bound), float(count)) for bound, count in zip(bounds, accumulate(counts), strict=True)]


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]
