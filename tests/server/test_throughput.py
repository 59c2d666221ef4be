"""The line about throughput: its figures, and that it needs no timer while there is no work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from headway.core.histogram import Histogram
from headway.core.messages import EngineStats
from headway.server.lifecycle import Lifecycle
from headway.server.metrics_source import StatsSource
from headway.server.throughput import ThroughputLog, figures
from tests.server.conftest import MakeClient
from tests.server.live import live_parrot

BEFORE = EngineStats(
    prompt_tokens=100, generation_tokens=50, num_steps=10, prefix_cache_queries=100, prefix_cache_hits=90,
    num_preemptions=3, device_busy_seconds=1.0, device_idle_seconds=1.0, has_device_clock=True,
    headway_seconds=Histogram((1e-3,), [1, 0], 0.5), host_waits={"item": 1},
)  # fmt: skip
AFTER = EngineStats(
    prompt_tokens=1100, generation_tokens=150, num_steps=60, prefix_cache_queries=300, prefix_cache_hits=140,
    num_preemptions=4, device_busy_seconds=2.9, device_idle_seconds=1.1, has_device_clock=True,
    headway_seconds=Histogram((1e-3,), [3, 2], 0.5008), host_waits={"item": 2, "nonzero": 1},
    num_running=7, num_waiting=2, kv_cache_usage=0.12345, run_ahead=2,
)  # fmt: skip


def test_the_figures_are_of_the_interval() -> None:
    assert figures(BEFORE, AFTER, 4.0) == {
        "prompt_tok_s": 250.0,
        "generation_tok_s": 25.0,
        "running": 7,
        "waiting": 2,
        "kv_usage": 0.123,
        "prefix_hit_rate": 0.25,
        "preemptions": 1,
        "steps": 50,
        "depth": 2,
        "headway_us": 200.0,
        "device_idle": 0.05,
        "host_waits": 2,
    }


def test_what_was_not_measured_is_not_said() -> None:
    line = figures(EngineStats(), EngineStats(), 1.0)
    assert line["prefix_hit_rate"] is None
    assert not line.keys() & {"headway_us", "device_idle", "host_waits"}
    still = figures(AFTER, AFTER, 1.0)
    assert still["headway_us"] is None and still["device_idle"] is None and still["host_waits"] == 0


class Clockwork:
    """A source that counts questions, and intervals that end when told to."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.lifecycle = Lifecycle()
        self.asked = 0
        self.sleeping: list[asyncio.Future[None]] = []
        self.answers: list[EngineStats | None] = []
        self.log = ThroughputLog(cast(StatsSource, self), self.lifecycle, seconds, self.sleep)

    async def read(self) -> EngineStats | None:
        self.asked += 1
        return self.answers.pop(0) if self.answers else EngineStats(generation_tokens=self.asked)

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        self.sleeping.append(asyncio.get_running_loop().create_future())
        return self.sleeping[-1]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def next_interval(self) -> None:
        await self.settle()
        self.sleeping.pop().set_result(None)
        await self.settle()


def play(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


def test_it_logs_while_there_is_work_and_then_sleeps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headway")

    async def body() -> None:
        made = Clockwork()
        made.lifecycle.num_sequences = 1
        for _ in range(3):
            made.log.wake()
            await made.settle()
        assert made.asked == 1 and len(made.sleeping) == 1, "one task however many requests wake it"
        await made.next_interval()
        made.lifecycle.num_sequences = 0
        await made.next_interval()
        assert len(caplog.records) == 2, "what was done in the last interval is said too"
        assert not made.sleeping and asyncio.all_tasks() == {asyncio.current_task()}, (
            "nothing is left that would wake up"
        )
        made.log.wake()
        await made.next_interval()
        assert len(caplog.records) == 3
        made.log.close()

    play(body())


def test_a_dead_engine_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headway")

    async def body() -> None:
        made = Clockwork()
        made.lifecycle.num_sequences = 1
        made.answers = [EngineStats(), None]
        made.log.wake()
        await made.next_interval()
        assert not caplog.records and not made.sleeping and asyncio.all_tasks() == {asyncio.current_task()}

    play(body())


def test_the_server_wakes_it_unless_it_is_turned_off(make_client: MakeClient) -> None:
    for off in (False, True):
        with make_client(disable_log_stats=off) as client:
            service = client.app.state.service  # type: ignore[attr-defined]
            assert (service.throughput is None) == off
            woken: list[int] = []
            if not off:
                service.throughput.wake = lambda woken=woken: woken.append(1)
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
            assert len(woken) == (0 if off else 1)


def test_the_line_of_a_live_server() -> None:
    with live_parrot(log_format="json", log_stats_interval=1.0) as live:
        live.wait_ready()
        with live.client() as client:
            client.post("/v1/completions", json={"prompt": "a"})
        live.wait_for('"message":"throughput","prompt_tok_s":')
