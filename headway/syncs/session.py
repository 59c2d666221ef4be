"""Watching a piece of work from begin to end: probes on every thread, the device's rows, one ``Run`` to report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from headway.syncs.allowlist import AllowList
from headway.syncs.errors import ProbeError
from headway.syncs.findings import Log, Wait
from headway.syncs.probes import Probe
from headway.syncs.profiler_probe import ProfilerRun
from headway.syncs.regions import PROCESS, judge
from headway.syncs.report import Run
from headway.syncs.steps import STEPS
from headway.syncs.target import children, last_words, on_every_thread

DRIVERS = ("auto", "cupti", "profiler", "off")
"""How the driver boundary is watched."""


def watch(
    work: Callable[[], int],
    command: list[str],
    allow: AllowList,
    *,
    simulate: bool = False,
    driver: str = "auto",
) -> Run:
    """Do ``work`` once, watched on all threads that it starts; its result is the run's exit status.

    Args:
        command: what the report says was run.
        driver: one of DRIVERS.

    Raises:
        ProbeError: nothing could be watched. What goes wrong later is in the run's ``unproven``, beside what was found.
    """
    probes, mode, notes = _probes(simulate, driver)
    log = Log(f"{probe.name}: {probe.watches}" for probe in probes)

    def hear(wait: Wait) -> None:
        log.add(allow.apply(wait))

    def enter() -> None:
        if profiler is not None:
            profiler.know_thread()
        for probe in probes:
            probe.attach(judge)

    def leave() -> None:
        for probe in reversed(probes):
            probe.detach()

    profiler = ProfilerRun() if mode == "profiler" else None
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(children())
        if profiler is not None:
            stack.enter_context(profiler)
        stack.enter_context(on_every_thread(enter, leave))  # before anybody listens: proofs wait on purpose
        if profiler is not None:
            profiler.mark()
        PROCESS.watch(hear)
        stack.callback(PROCESS.unwatch, hear)
        begin, unproven = time.perf_counter_ns(), list[str]()
        STEPS.number = None
        reached = _reach(simulate)
        status = 2
        try:
            with last_words(unproven):
                status = work()
        except ProbeError as error:
            unproven.append(str(error))
        wall = (time.perf_counter_ns() - begin) / 1000
        PROCESS.unwatch(hear)
        unproven += _silence(probes, log, reached, simulate)
    run = Run(command, mode, log, wall, {}, begin / 1000, started, notes, status, unproven=unproven)
    run.started = STEPS.number or 0
    if profiler is not None:
        log.probes.append(f"{profiler.name}: {profiler.watches}")
        try:
            _merge(run, profiler, allow)
        except ProbeError as error:
            run.unproven.append(str(error))
    return run


def _reach(simulate: bool) -> int:
    """How many tensors the device has had so far."""
    if simulate:
        from headway.syncs.sim.tensor import COUNT

        return COUNT.made
    import torch

    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def _silence(probes: list[Probe], log: Log, reached: int, simulate: bool) -> list[str]:
    """Why silence would prove nothing."""
    found = []
    if _reach(simulate) == reached and not log.waits:
        where = "the pretended device" if simulate else "the device"
        found.append(f"no tensor reached {where}: does the program use device='cuda', and in this process?")
    for probe in probes:
        check = getattr(probe, "check", None)
        try:
            if check is not None:
                check()
        except ProbeError as error:
            found.append(f"{probe.name}: {error}")
    return found


def _probes(simulate: bool, driver: str) -> tuple[list[Probe], str, list[str]]:
    """What watches, under which name, with which limits.

    Raises:
        ProbeError: the probe asked for cannot be had.
    """
    if simulate:
        from headway.syncs.simulate import SimulationProbe

        limits = "simulated: which calls would wait, not how long; no driver boundary"
        return [SimulationProbe()], "simulation", [limits]
    from headway.syncs.cupti_probe import CuptiProbe
    from headway.syncs.live import LiveProbe
    from headway.syncs.runtime import CudaRuntime

    runtime = CudaRuntime()
    runtime.require()
    if driver == "off":
        limits = "driver boundary not watched: waits inside extensions are not in this report"
        return [LiveProbe(runtime)], "live", [limits]
    if driver in ("auto", "cupti"):
        probe = CuptiProbe()
        try:
            probe.attach(judge)
            probe.detach()
            limits = "CUPTI callbacks give no kernel times: GPU rows need --driver profiler"
            return [LiveProbe(runtime), probe], "cupti", [limits]
        except ProbeError:
            if driver == "cupti":
                raise
    limits = "torch.profiler's records: outside torch calls the line is that of the call before; none is allowed"
    return [LiveProbe(runtime, annotate=True)], "profiler", [limits]


def _merge(run: Run, profiler: ProfilerRun, allow: AllowList) -> None:
    """Add the driver's waits on lines where no live probe saw one, and those outside; take the streams from the trace."""
    trace = profiler.require_proof()
    seen = {(finding.site.file, finding.site.line) for finding in run.log.findings}
    offset = run.start_micros - trace.begin
    for wait in trace.waits:
        if (wait.site.file, wait.site.line) not in seen:
            run.log.add(allow.apply(trace.shifted(wait, offset)))
    for wait in trace.outside:
        run.log.add(trace.shifted(wait, offset))
    run.unread = trace.unread
    run.streams = {
        name: [(at + offset, duration, what) for at, duration, what in spans] for name, spans in trace.streams.items()
    }
