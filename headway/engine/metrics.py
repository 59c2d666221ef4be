"""What the host loop measures of itself and of the device, step by step: additions to plain numbers, no wait, no lock.

A step costs five readings of the host's clock, two timing events and two differences between them (``device.step_clock``);
nothing is done per token. Times of the device are read when the step's result has arrived, never earlier.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

from headway.core.config import USUAL_THRESHOLDS
from headway.core.histogram import Histogram
from headway.core.messages import EngineStats, StepTrace, StepUpdates
from headway.core.plan import StepPlan
from headway.device.step_clock import StepClock
from headway.runner.runner import InFlight

ROW_BOUNDS = tuple(2**i for i in range(11))
TOKEN_BOUNDS = (1, *(2**i for i in range(3, 15)))
SECOND_BOUNDS = tuple(round(base * 10.0**power, 9) for power in range(-5, 0) for base in (1.0, 2.0, 5.0))
"""10 us to 0.5 s: durations of steps and of what the host does in them, and leads."""


class StepMeter:
    """One engine's measurements. The host loop calls ``begin``, ``scheduled``, ``launched`` and later ``applied`` per step.

    Args:
        clock: the runner's.
        traced_steps: latest steps kept with all their times, for timelines.
    """

    def __init__(self, clock: StepClock, traced_steps: int = USUAL_THRESHOLDS.traced_steps) -> None:
        self._clock, self._traced_steps = clock, traced_steps
        self._begun = self._planned = 0.0
        self._rested = True
        self._open: deque[tuple[StepTrace, bool]] = deque()
        self._recent: list[StepTrace] = []
        self._place = 0
        self._arrivals: dict[str, float] = {}
        self._queued: dict[str, float] = {}
        self._schedule_us = self._launch_us = self._apply_us = 0.0
        self._busy_us = self._idle_us = 0.0
        self._timed = self._dry = 0
        self._rows, self._tokens = Histogram.over(ROW_BOUNDS), Histogram.over(TOKEN_BOUNDS)
        self._host, self._device = Histogram.over(SECOND_BOUNDS), Histogram.over(SECOND_BOUNDS)
        self._headway = Histogram.over(SECOND_BOUNDS)

    # -- requests --------------------------------------------------------------------------------------------------

    def arrived(self, request_id: str, engine_was_idle: bool) -> None:
        """A request was queued. After an idle engine's pause the device is not to blame for having stood still."""
        self._arrivals[request_id] = perf_counter()
        self._rested = self._rested or engine_was_idle

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self._arrivals.pop(request_id, None)
        self._queued.pop(request_id, None)

    @property
    def num_kept(self) -> int:
        """Times of requests that are kept: those that are open."""
        return len(self._arrivals.keys() | self._queued.keys())

    def stamp(self, updates: StepUpdates) -> None:
        """Tell each request's first update how long the request had waited to be scheduled."""
        if self._queued:
            for update in updates.more.values():  # a first update says more than a token
                update.queue_seconds = self._queued.pop(update.request_id, None)
            if updates.width:
                updates.queue_seconds = [self._queued.pop(name, None) for name in updates.request_ids]

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Scheduling begins."""
        self._begun = perf_counter()

    def scheduled(self) -> None:
        """There is a plan, and its launch begins."""
        self._planned = perf_counter()

    def launched(self, plan: StepPlan, step: InFlight, replayed: bool) -> None:
        """The plan's work is queued on the device."""
        now = perf_counter()
        ids = plan.texts.request_ids if plan.texts is not None else [a.request.request_id for a in plan.admissions]
        for request_id in ids:
            at = self._arrivals.pop(request_id, None)
            if at is not None:
                self._queued[request_id] = self._planned - at
        rows = plan.num_rows
        tokens = rows if plan.num_decode_rows == rows else plan.num_tokens
        events = step.events
        submitted_at = self._planned if events is None else events.submitted_at
        trace = StepTrace(
            step=plan.step,
            rows=rows,
            tokens=tokens,
            replayed=replayed,
            begun=self._begun,
            schedule_us=(self._planned - self._begun) * 1e6,
            launch_us=(now - self._planned) * 1e6,
            submitted_us=(submitted_at - self._begun) * 1e6,
        )
        self._open.append((trace, self._rested))
        self._rested = False
        self._rows.observe(rows)
        self._tokens.observe(tokens)

    def applied(self, step: InFlight, asked: float, arrived: float) -> StepTrace:
        """The oldest step is over; returns all its times.

        Args:
            asked, arrived: ``perf_counter`` when its result was asked for, and when it was there.
        """
        trace, rested = self._open.popleft()
        trace.wait_begun_us, trace.wait_us = (asked - trace.begun) * 1e6, (arrived - asked) * 1e6
        trace.apply_us = (perf_counter() - arrived) * 1e6
        self._schedule_us += trace.schedule_us
        self._launch_us += trace.launch_us
        self._apply_us += trace.apply_us
        self._host.observe((trace.schedule_us + trace.launch_us + trace.apply_us) * 1e-6)
        if step.events is not None:
            self._time_device(step, trace, rested)
        if len(self._recent) < self._traced_steps:
            self._recent.append(trace)
        else:
            self._recent[self._place] = trace
            self._place = (self._place + 1) % self._traced_steps
        return trace

    def _time_device(self, step: InFlight, trace: StepTrace, rested: bool) -> None:
        assert step.events is not None
        times = self._clock.measure(step.events)
        if times is None:
            return
        trace.headway_us, trace.busy_us = times.headway, times.busy
        self._busy_us += times.busy
        self._device.observe(times.busy * 1e-6)
        if rested:
            return
        trace.idle_us = times.idle
        self._timed += 1
        self._dry += times.headway <= 0.0
        self._idle_us += times.idle
        self._headway.observe(times.headway * 1e-6)

    # -- reading ---------------------------------------------------------------------------------------------------

    def fill(self, stats: EngineStats) -> None:
        """Write everything measured so far into ``stats``: copies, which another thread may keep."""
        stats.schedule_seconds, stats.launch_seconds = self._schedule_us * 1e-6, self._launch_us * 1e-6
        stats.apply_seconds = self._apply_us * 1e-6
        stats.device_busy_seconds, stats.device_idle_seconds = self._busy_us * 1e-6, self._idle_us * 1e-6
        stats.num_timed_steps, stats.num_dry_steps = self._timed, self._dry
        stats.rows_per_step, stats.tokens_per_step = self._rows.copy(), self._tokens.copy()
        stats.host_step_seconds, stats.device_step_seconds = self._host.copy(), self._device.copy()
        stats.headway_seconds = self._headway.copy()
        recent, place = list(self._recent), self._place
        stats.recent_steps = recent[place:] + recent[:place]
