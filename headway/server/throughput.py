"""A log line every few seconds: what the engine has done since the last one. Nothing runs while there is no work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headway.core.histogram import Histogram
from headway.core.log import logger
from headway.core.messages import EngineStats
from headway.server.lifecycle import Lifecycle
from headway.server.metrics_source import StatsSource


class ThroughputLog:
    """Logs from the first request on until none is open at the end of an interval. Belongs to the event loop's thread.

    Args:
        seconds: between two lines.
        sleep: what waits for them.
    """

    def __init__(
        self,
        source: StatsSource,
        lifecycle: Lifecycle,
        seconds: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source, self._lifecycle, self._seconds, self._sleep = source, lifecycle, seconds, sleep
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There is work."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Log no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        before, since = await self._source.read(), loop.time()
        while before is not None:
            await self._sleep(self._seconds)
            after, now = await self._source.read(), loop.time()
            if after is not None:
                logger.info("throughput", extra={"fields": figures(before, after, now - since)})
            before, since = after if self._lifecycle.num_sequences else None, now


def figures(before: EngineStats, after: EngineStats, seconds: float) -> dict[str, float | None]:
    """What one line says of the interval between two states of the counters. None: nothing to tell it from.

    ``prefix_hit_rate``, ``kv_usage`` and ``device_idle`` are shares of 1; ``headway_us`` is the mean over the steps,
    ``acceptance_length`` that of tokens a row of drafts brought.
    """

    def grown(name: str) -> float:
        return float(getattr(after, name) - getattr(before, name))

    seconds = max(seconds, 1e-9)
    queries = grown("prefix_cache_queries")
    busy, idle = grown("device_busy_seconds"), grown("device_idle_seconds")
    line: dict[str, float | None] = {
        "prompt_tok_s": round(grown("prompt_tokens") / seconds, 1),
        "generation_tok_s": round(grown("generation_tokens") / seconds, 1),
        "running": after.num_running,
        "waiting": after.num_waiting,
        "kv_usage": round(after.kv_cache_usage, 3),
        "prefix_hit_rate": round(grown("prefix_cache_hits") / queries, 3) if queries else None,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "steps": after.num_steps - before.num_steps,
        "depth": after.run_ahead,
    }
    if after.num_accepted_tokens_per_pos:
        drafts = grown("num_drafts")
        line["acceptance_length"] = round(1 + grown("num_accepted_tokens") / drafts, 2) if drafts else None
    if after.has_device_clock:
        line["headway_us"] = _mean_us(before.headway_seconds, after.headway_seconds)
        line["device_idle"] = round(idle / (busy + idle), 3) if busy + idle else None
    if after.host_waits is not None:
        line["host_waits"] = sum(after.host_waits.values()) - sum((before.host_waits or {}).values())
    return line


def _mean_us(before: Histogram, after: Histogram) -> float | None:
    count = after.count - before.count
    return round((after.total - before.total) / count * 1e6, 1) if count else None
