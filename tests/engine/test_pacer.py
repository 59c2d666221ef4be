"""The run-ahead depth is the least that keeps the device fed: on a simulated clock, and in an engine over a paced device."""

from __future__ import annotations

import random
from collections import deque
from itertools import count
from pathlib import Path

import pytest

from headway.core.config import EngineArgs
from headway.engine.boot import build_engine
from headway.engine.pacer import CALM_WINDOWS, HOST_BOUND_DEPTH, MARGIN, MAX_ADAPTIVE_DEPTH, WINDOW, Pacer
from tests.engine.harness import request
from tests.engine.paced_device import PacedClock, PacedDevice

TICK = 5e-6


class Loop:
    """The host loop on a clock of its own: microseconds of a step on the device, and of the host's work for it."""

    def __init__(self, pacer: Pacer, device_us: float, host_us: float, jitter: float = 0.0) -> None:
        self.pacer, self.device_us, self.host_us = pacer, device_us, host_us
        self.rng, self.jitter = random.Random(0), jitter
        self.now = self.free_at = self.idle_us = 0.0
        self.in_flight: deque[tuple[float, float, float, float]] = deque()
        self.headways: list[float] = []

    def step(self, stall_us: float = 0.0, times: int = 1) -> None:
        """One turn: launch when the depth allows it, then apply the oldest when it must. The host may stall; the step may take
        host and device several ``times`` as long."""
        host = self.host_us * times * (1 + self.jitter * self.rng.uniform(-1, 1))
        if len(self.in_flight) <= self.pacer.depth:
            self.now += host / 2 + stall_us
            headway = max(self.free_at - self.now, 0.0)
            self.idle_us += max(self.now - self.free_at, 0.0)
            self.free_at = max(self.free_at, self.now) + self.device_us * times
            self.in_flight.append((self.free_at, headway, self.device_us * times, host))
        if len(self.in_flight) > self.pacer.depth:
            ended, headway, device_us, host = self.in_flight.popleft()
            self.now = max(self.now, ended) + host / 2
            self.headways.append(headway)
            self.pacer.observe(headway, device_us, host)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def auto() -> Pacer:
    return Pacer("auto", asynchronous=True)


def test_a_fixed_depth_never_moves() -> None:
    pacer = Pacer(2, asynchronous=True)
    Loop(pacer, device_us=100, host_us=90).run(500)
    assert pacer.depth == 2


def test_auto_is_plain_on_a_synchronous_device() -> None:
    assert Pacer("auto", asynchronous=False).depth == 0


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize(
    ("device_us", "host_us", "depth"),
    [(5000, 300, 1), (900, 300, 1), (600, 300, 2), (600, 120, 1), (350, 300, 3)],
)
def test_the_depth_is_the_least_that_keeps_the_margin(
    device_us: float, host_us: float, depth: int, jitter: float
) -> None:
    """d steps in flight give d device times less a host time."""
    pacer = auto()
    loop = Loop(pacer, device_us, host_us, jitter)
    loop.run(400)
    depths = []
    for _ in range(3000):
        loop.step()
        depths.append(pacer.depth)
    assert set(depths) == {depth}
    assert sorted(loop.headways[-3000:])[600] >= MARGIN * host_us * 0.99
    assert depth == 1 or (depth - 1) * device_us - host_us < MARGIN * host_us


def test_a_host_slower_than_the_device_gains_little_by_depth() -> None:
    pacer = auto()
    loop = Loop(pacer, device_us=350, host_us=300)
    loop.run(400)
    assert pacer.depth == 3
    loop.device_us = 200
    loop.run(3000)
    assert pacer.depth == HOST_BOUND_DEPTH


def test_the_depth_comes_down_again_when_steps_get_longer() -> None:
    pacer = auto()
    loop = Loop(pacer, device_us=350, host_us=300)
    loop.run(400)
    assert pacer.depth == 3
    loop.device_us = 3000
    loop.run(2 * (CALM_WINDOWS + 1) * WINDOW + 8 * MAX_ADAPTIVE_DEPTH)
    assert pacer.depth == 1


def test_a_hiccup_of_the_host_moves_nothing() -> None:
    pacer = auto()
    loop = Loop(pacer, device_us=900, host_us=300)
    loop.run(100)
    for _ in range(20):
        loop.step(stall_us=5000)
        loop.run(150)
        assert pacer.depth == 1


def test_a_long_prompt_now_and_then_moves_nothing() -> None:
    pacer = auto()
    loop = Loop(pacer, device_us=900, host_us=300)
    loop.run(100)
    for _ in range(40):
        loop.step(times=20)
        loop.run(20)
        assert pacer.depth == 1


def test_the_device_idles_little_once_the_depth_is_found() -> None:
    pacer = auto()
    loop = Loop(pacer, device_us=350, host_us=300, jitter=0.8)
    loop.run(500)
    idle, begun = loop.idle_us, loop.now
    loop.run(5000)
    assert loop.idle_us - idle < 0.005 * (loop.now - begun)


class Clock(PacedClock):
    """Every look at the clock is ``TICK`` of the host's work."""

    def __init__(self) -> None:
        ticks = count()
        super().__init__(lambda: next(ticks) * TICK)


@pytest.mark.parametrize(("host_times", "depth"), [(20.0, 1), (1.6, 2)])
def test_an_engine_is_as_deep_as_its_steps_are_short(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, host_times: float, depth: int
) -> None:
    clock = Clock()
    for module in ("engine.metrics", "engine.core"):
        monkeypatch.setattr(f"headway.{module}.perf_counter", clock.now)
    device = PacedDevice(1.0, clock)
    args = EngineArgs(
        model=str(tiny_model), dtype="float32", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64,
        block_size=8, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    core = build_engine(args, progress=False, device=device)
    core._runner.executor.body.results[:, :, 0] = (
        1  # what the device would write: every row samples token 0 and goes on
    )
    core.add(request("a", [5, 6, 7], max_tokens=250, ignore_eos=True))
    for _ in range(20):
        core.step()
    host = core.stats().host_step_seconds
    device.step_seconds = host_times * host.total / host.count
    for _ in range(100):
        core.step()
    core.add(request("b", [5, 6, 7], max_tokens=50, ignore_eos=True))
    turns = 0
    while not any(update.request_id == "b" for update in core.step()):
        turns += 1
    assert core.stats().run_ahead == depth
    assert turns <= depth + 1, "a newcomer waits for the steps in flight, and no more"
    for name in "ab":
        core.abort(name)
    while core.has_work():
        core.step()
    core.shutdown()
