"""Where a decode step's microseconds are: how busy the device is, kernels against bytes, host waits and copies.

The profiler slows the host, so device time comes from profiled runs and the steps these are compared with from unprofiled ones,
all before the first profile. Host waits are blocking CUDA calls on the launching thread as
CUPTI saw them, less the back-pressure the engine itself counts, which is the sign of a host that is ahead.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from headway.cli.bench.anchors.context import Bench, free_memory, plain, random_prompts
from headway.cli.bench.anchors.floors import bandwidth, step_bytes
from headway.cli.bench.anchors.table import NOT_SERVED
from headway.core.config import EngineArgs
from headway.syncs.driver import blocking

if TYPE_CHECKING:
    from headway.engine.core import EngineCore

FIGURES: Final = {
    "busy_pct": ("%", "higher"),
    "kernel_over_floor": ("x", "lower"),
    "kernels_per_step": ("kernels", "lower"),
    "host_us_per_step": ("us", "lower"),
    "host_waits_per_step": ("waits", "lower"),
    "h2d_per_step": ("copies", "lower"),
    "d2h_per_step": ("copies", "lower"),
}
SETTLE_STEPS: Final = 30
MARK: Final = "headway steps"
TIMELINE_STEPS: Final = 3
TIMELINE_ROWS: Final = 8
TIMELINE_EVENTS: Final = 3000


@dataclass(frozen=True, slots=True)
class Event:
    """Something the profiler saw. Times in microseconds.

    Attributes:
        lane: "kernel", "copy" or "host" (a CUDA call).
    """

    lane: str
    name: str
    start: float
    us: float


@dataclass(frozen=True, slots=True)
class Timed:
    """One steady decode, not profiled.

    Attributes:
        step_us, host_us: wall time of a step, and the part in which the host did not wait for the device.
    """

    step_us: float
    host_us: float


@dataclass(frozen=True, slots=True)
class Profiled:
    """The events of ``steps`` profiled steps of the same decode.

    Attributes:
        back_pressure: waits per step that the engine counted itself.
        floor_us: time to read the step's bytes; None if the card is unknown.
    """

    steps: int
    back_pressure: float
    floor_us: float | None
    events: Sequence[Event]


def figure_name(figure: str, rows: int) -> str:
    """``figure`` at ``rows`` rows."""
    return f"{figure}_bs{rows}"


def announce(bench: Bench) -> list[str]:
    """The figures of this module."""
    names = []
    for figure, (unit, better) in FIGURES.items():
        found = [figure_name(figure, rows) for rows in bench.scale.rows]
        bench.table.announce(found, unit, better)
        names += found
    return names


def measure(bench: Bench, card: str) -> dict[str, Any] | None:
    """Measure what is wanted, with one engine; gives a timeline of a few steps, if there is a device to draw one of."""
    import torch

    names = announce(bench)
    if not bench.table.wants(*names):
        return None
    if not torch.cuda.is_available():
        host = [figure_name("host_us_per_step", rows) for rows in bench.scale.rows]
        bench.table.mark(
            [name for name in names if name not in host], NOT_SERVED, "needs a CUDA device and its profiler"
        )
    from headway.engine.boot import build_engine

    timeline = None
    core = build_engine(EngineArgs(model=str(bench.folder), skip_tokenizer_init=True, **bench.engine), progress=False)
    gc.collect()
    gc.freeze()  # as the engine's own process does
    chosen = [rows for rows in bench.scale.rows if bench.table.wants(*_names(rows))]
    timed: dict[int, Timed] = {}
    try:
        for rows in chosen:
            with bench.table.measuring(_names(rows)):
                timed[rows] = time_steps(bench, core, rows)
        for rows in timed:
            with bench.table.measuring(_names(rows)):
                profiled = profile_steps(bench, core, rows, bandwidth(card))
                for name, value in figures(timed[rows], profiled, torch.cuda.is_available()).items():
                    bench.table.add(figure_name(name, rows), value)
                if timeline is None or rows == TIMELINE_ROWS:
                    timeline = make_timeline(profiled.events, rows)
    finally:
        core.shutdown()
        del core
        free_memory()
    return timeline


def _names(rows: int) -> list[str]:
    return [figure_name(figure, rows) for figure in FIGURES]


def figures(timed: Timed, profiled: Profiled, has_device: bool) -> dict[str, float]:
    """Figure -> value per step."""
    if not has_device:
        return {"host_us_per_step": timed.host_us}
    kernels = [event for event in profiled.events if event.lane == "kernel"]
    copies = [event for event in profiled.events if event.lane == "copy"]
    calls = [event for event in profiled.events if event.lane == "host"]
    busy_us = covered_us(kernels) / profiled.steps
    waits = sum(blocking(event.name) is not None for event in calls) / profiled.steps
    found = {
        "busy_pct": 100 * busy_us / timed.step_us,
        "kernels_per_step": len(kernels) / profiled.steps,
        "host_us_per_step": timed.host_us,
        "host_waits_per_step": max(waits - profiled.back_pressure, 0.0),
        "h2d_per_step": sum("HtoD" in event.name for event in copies) / profiled.steps,
        "d2h_per_step": sum("DtoH" in event.name for event in copies) / profiled.steps,
    }
    if profiled.floor_us is not None:
        found["kernel_over_floor"] = busy_us / profiled.floor_us
    return found


def covered_us(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of ``events`` ran.

    Not their sum: kernels that are launched early (``kernels.triton_early``) lie over the kernel they wait for.
    """
    return sum(us for _, us in gained_us(events))


def gained_us(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """By when they began, each of ``events`` and the microseconds in which it ran after all before it had ended."""
    reached = float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        end = event.start + event.us
        yield event, max(0.0, end - max(event.start, reached))
        reached = max(reached, end)


def time_steps(bench: Bench, core: EngineCore, rows: int) -> Timed:
    """Time ``rows`` requests in steady decode, around the mean length of the ITL rows: medians of the runs."""
    seen = []
    for _ in range(bench.runs):
        with _decoding(bench, core, rows, _first_length(bench), SETTLE_STEPS):
            seen.append(_steps(core, bench.scale.steps))
    return Timed(median(run.us for run in seen), median(run.us - run.waited_us for run in seen))


def profile_steps(bench: Bench, core: EngineCore, rows: int, bytes_per_second: float | None) -> Profiled:
    """Profile fewer of the same steps, from the middle."""
    timed, first = bench.scale.steps, _first_length(bench)
    wanted = max(timed * 2 // 5, 1)
    with _decoding(bench, core, rows, first, SETTLE_STEPS + (timed - wanted) // 2):
        recorder = Recorder()
        with recorder:
            seen = _steps(core, wanted)
    length = first + SETTLE_STEPS + timed // 2
    floor = None if bytes_per_second is None else step_bytes(bench, rows, length) / bytes_per_second * 1e6
    return Profiled(seen.launched, seen.waits, floor, recorder.events)


def _first_length(bench: Bench) -> int:
    """Of the prompts, so that the middle step is the ITL rows'."""
    scale = bench.scale
    mean = scale.row_prompt + scale.long // 2
    most = scale.max_model_len - 2 * (SETTLE_STEPS + scale.steps)
    return min(max(mean - SETTLE_STEPS - scale.steps // 2, 1), most)


@dataclass(frozen=True, slots=True)
class _Run:
    """Steps launched, and per launched step: microseconds, of which waited, and waits. Waits are of back-pressure."""

    launched: int
    us: float
    waited_us: float
    waits: float


def _steps(core: EngineCore, count: int) -> _Run:
    before, begin = core.stats(), time.perf_counter()
    for _ in range(count):
        core.step()
    elapsed, after = time.perf_counter() - begin, core.stats()
    launched = max(after.num_steps - before.num_steps, 1)  # the pacer may launch one more or one less
    waited = after.back_pressure_seconds - before.back_pressure_seconds
    waits = after.back_pressure_waits - before.back_pressure_waits
    return _Run(launched, elapsed / launched * 1e6, waited / launched * 1e6, waits / launched)


@contextmanager
def _decoding(bench: Bench, core: EngineCore, rows: int, length: int, settle: int) -> Iterator[None]:
    """``rows`` requests past their prompts of ``length`` tokens and ``settle`` steps; ended afterwards."""
    from headway.core.messages import AddRequest

    prompts = random_prompts(random.Random(rows), rows, length, core.info.vocab_size)
    params = plain(bench.scale.max_model_len - length)
    for row, prompt in enumerate(prompts):
        name = f"{rows}-{row}"
        core.add(AddRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=row, eos_token_ids=[]))
    while core.stats().num_waiting or core.stats().num_running < rows:
        core.step()
    try:
        for _ in range(settle):
            core.step()
        yield
    finally:
        for row in range(rows):
            core.abort(f"{rows}-{row}")
        while core.has_work():
            core.step()


class Recorder:
    """torch.profiler around steps; ``events`` afterwards. Nothing without a CUDA device.

    The device is drained first, so that kernels of earlier steps are not counted; calls count only inside a mark of our own,
    because the profiler waits for the device itself when it begins and ends.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._profile: Any = None
        self._mark: Any = None

    def __enter__(self) -> Recorder:
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.__enter__()
            self._mark = record_function(MARK)
            self._mark.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is None:
            return
        import torch

        self._mark.__exit__(None, None, None)
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        self.events = sort_events(
            (e.device_type.name == "CUDA", e.name, e.time_range.start, e.time_range.end) for e in self._profile.events()
        )


def sort_events(raw: Iterable[tuple[bool, str, float, float]]) -> list[Event]:
    """The profiler's records as kernels, copies and CUDA calls.

    Args:
        raw: whether it ran on the device, name, start, end; one of them is the mark of the host's steps.
    """
    seen = list(raw)
    [(begin, end)] = [(start, stop) for on_device, name, start, stop in seen if name == MARK and not on_device]
    events = []
    for on_device, name, start, stop in seen:
        if on_device and name != MARK:  # the profiler repeats the mark on the device's lane
            lane = "copy" if name.startswith(("Memcpy", "Memset")) else "kernel"
            events.append(Event(lane, name, start, stop - start))
        elif name.startswith("cu") and begin <= start <= end and not on_device:
            events.append(Event("host", name, start, stop - start))
    return events


def make_timeline(events: Sequence[Event], rows: int) -> dict[str, Any] | None:
    """A few steps as plain lists for the plot, from one upload to a later one; None if there are too few."""
    uploads = sorted(event.start for event in events if event.lane == "copy" and "HtoD" in event.name)
    if len(uploads) <= TIMELINE_STEPS:
        return None
    first = len(uploads) // 2
    begin, end = uploads[first], uploads[min(first + TIMELINE_STEPS, len(uploads) - 1)]
    inside = sorted((e for e in events if begin <= e.start < end), key=lambda e: e.start)[:TIMELINE_EVENTS]
    return {
        "rows": rows,
        "events": [[e.lane, e.name[:60], round(e.start - begin, 2), round(e.us, 2)] for e in inside],
    }
