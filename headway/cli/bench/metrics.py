"""Figures of a serving run, under vLLM's names, and the block of text users know.

TTFT: from sending a request to the first piece of its answer. ITL: between pieces; a piece may bring several tokens (a server
that runs ahead may send two at once), so ITL is of pieces, as in vLLM. TPOT: (last piece - first piece) / (tokens - 1), with
the server's own count of tokens, so it does not depend on how tokens were packed. E2EL: from sending to the last piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headway.cli.bench.load import Record

TITLES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
WIDTH: Final = 50
LAG_WARNING_MS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the block repeats of the run's options."""

    request_rate: float
    max_concurrency: int | None
    metrics: Sequence[str]
    percentiles: Sequence[float]
    limits_ms: dict[str, float]


def tpot(record: Record) -> float | None:
    """Seconds per token after the first; None with fewer than two tokens."""
    if record.output_tokens < 2:
        return None
    return (record.latency - record.ttft) / (record.output_tokens - 1)


def figures(records: list[Record], prompt_tokens: list[int | None], begin: float, settings: Settings) -> dict[str, Any]:
    """All figures of a run: throughputs per second, latencies in milliseconds, durations in seconds from the start.

    ``last_start`` is when the last request was sent. At a given rate the throughput says no more than how long after it the
    last answer ended: a server that is never behind does not reach the rate either.

    Args:
        prompt_tokens: planned length by index, where the server did not say.
        begin: ``perf_counter`` time of the start.
    """
    good = [record for record in records if record.error is None]
    duration = max((record.start + record.latency for record in good), default=begin) - begin
    per_second = 1.0 / duration if duration > 0 else 0.0
    num_input = sum(record.prompt_tokens or prompt_tokens[record.index] or 0 for record in good)
    num_output = sum(record.output_tokens for record in good)
    found: dict[str, Any] = {
        "duration": duration,
        "last_start": max((record.start for record in records), default=begin) - begin,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) * per_second,
        "request_goodput": sum(_is_good(r, settings.limits_ms) for r in good) * per_second
        if settings.limits_ms
        else None,
        "output_throughput": num_output * per_second,
        "total_token_throughput": (num_input + num_output) * per_second,
        "max_output_tokens_per_s": _peak_tokens(good, begin),
        "max_concurrent_requests": _peak_open(good),
        "output_tokens_counted_by_server": all(record.counted for record in good),
        "lag_p99_ms": _lag_ms(records, settings),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
    }
    for name, values in latencies(good).items():
        found |= _summary(name, values, settings.percentiles)
    return found


def detailed(records: list[Record], prompt_tokens: list[int | None]) -> dict[str, list[Any]]:
    """What is written of each request, under vLLM's names; times in seconds, failed requests with what they got."""
    return {
        "input_lens": [record.prompt_tokens or prompt_tokens[record.index] or 0 for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itl for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def latencies(good: list[Record]) -> dict[str, list[float]]:
    """Metric -> milliseconds, one a request (ITL: one a gap)."""
    return {
        "ttft": [record.ttft * 1e3 for record in good],
        "tpot": [value * 1e3 for value in map(tpot, good) if value is not None],
        "itl": [gap * 1e3 for record in good for gap in record.itl],
        "e2el": [record.latency * 1e3 for record in good],
    }


def _summary(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, float]:
    import numpy as np

    array = np.asarray(values or [0.0])
    found = {f"mean_{name}_ms": array.mean(), f"median_{name}_ms": np.median(array), f"std_{name}_ms": array.std()}
    found |= {f"p{percent:g}_{name}_ms": np.percentile(array, percent) for percent in percentiles}
    return {key: float(value) for key, value in found.items()}


def _is_good(record: Record, limits_ms: dict[str, float]) -> bool:
    spent = {"ttft": record.ttft, "tpot": tpot(record) or 0.0, "e2el": record.latency}
    return all(spent[name] * 1e3 <= limit for name, limit in limits_ms.items())


def _lag_ms(records: list[Record], settings: Settings) -> float:
    """How late requests were sent, 99th percentile; a limit on concurrency holds them back on purpose: then 0."""
    import numpy as np

    at_once = len({record.due for record in records}) < 2
    if settings.max_concurrency is not None or at_once:
        return 0.0
    return float(np.percentile([(record.start - record.due) * 1e3 for record in records], 99))


def _peak_tokens(good: list[Record], begin: float) -> float:
    """Most tokens that arrived in one second of the run; a request's tokens are spread evenly over its pieces."""
    weights: dict[int, float] = {}
    for record in good:
        moment, weight = record.start + record.ttft - begin, record.output_tokens / max(record.num_chunks, 1)
        for gap in (0.0, *record.itl):
            moment += gap
            weights[int(moment)] = weights.get(int(moment), 0.0) + weight
    return max(weights.values(), default=0.0)


def _peak_open(good: list[Record]) -> int:
    """Most requests that were open at one moment."""
    edges = [(record.start, 1) for record in good] + [(record.start + record.latency, -1) for record in good]
    most = current = 0
    for _, change in sorted(edges):
        current += change
        most = max(most, current)
    return most


def block(found: dict[str, Any], settings: Settings) -> str:
    """The result as text."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines.append(_line("Successful requests:", found["completed"]))
    lines.append(_line("Failed requests:", found["failed"]))
    if settings.max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", settings.max_concurrency))
    if settings.request_rate != float("inf"):
        lines.append(_line("Request rate configured (RPS):", float(settings.request_rate)))
    lines.append(_line("Benchmark duration (s):", found["duration"]))
    lines.append(_line("Total input tokens:", found["total_input_tokens"]))
    lines.append(_line("Total generated tokens:", found["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", found["request_throughput"]))
    if found["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", found["request_goodput"]))
    lines.append(_line("Output token throughput (tok/s):", found["output_throughput"]))
    lines.append(_line("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"]))
    lines.append(_line("Peak concurrent requests:", float(found["max_concurrent_requests"])))
    lines.append(_line("Total token throughput (tok/s):", found["total_token_throughput"]))
    if "spec_decode_num_drafts" in found:
        lines.append("Speculative Decoding".center(WIDTH, "-"))
        lines.append(_line("Drafted tokens:", found["spec_decode_num_draft_tokens"]))
        lines.append(_line("Accepted tokens:", found["spec_decode_num_accepted_tokens"]))
        length = found["spec_decode_acceptance_length"]
        lines.append(_line("Acceptance length:", float("nan") if length is None else length))
    for name in settings.metrics:
        short, long = TITLES[name]
        lines.append(long.center(WIDTH, "-"))
        lines.append(_line(f"Mean {short} (ms):", found[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {short} (ms):", found[f"median_{name}_ms"]))
        for percent in settings.percentiles:
            lines.append(_line(f"P{percent:g} {short} (ms):", found[f"p{percent:g}_{name}_ms"]))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _line(label: str, value: float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40} {shown:<10}".rstrip()


def warnings(found: dict[str, Any], num_workers: int) -> list[str]:
    """What a reader of the figures must know."""
    notes = [f"{count} x {error}" for error, count in Counter(found["errors"]).most_common(5)]
    if not found["output_tokens_counted_by_server"]:
        notes.append("the server sent no usage for some requests; their tokens are counted by token ids or pieces")
    if found["lag_p99_ms"] > LAG_WARNING_MS:
        more = f"; use more than --num-workers {num_workers}"
        notes.append(f"the load generator was late by {found['lag_p99_ms']:.1f} ms (99th percentile){more}")
    busy = found.get("client_busy", 0.0)
    if busy > 0.9:
        notes.append(f"the load generator was busy {busy:.0%} of the time; use more than --num-workers {num_workers}")
    return notes
