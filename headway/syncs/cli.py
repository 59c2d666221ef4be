"""``headway syncs``: run a program and report where its host waits for its GPU."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from pathlib import Path
from typing import Final

from headway.syncs.allowlist import AllowList
from headway.syncs.errors import AllowListError, ProbeError
from headway.syncs.findings import Log, Wait
from headway.syncs.probes import Probe
from headway.syncs.regions import PROCESS, judge
from headway.syncs.report import Run, show, write_html, write_json
from headway.syncs.target import UsageError, children, on_every_thread, parse
from headway.syncs.target import run as run_target

FAILED: Final = 3
"""Exit status when --fail-on is reached: unlike a failure of the target or of the command line (2)."""
DRIVERS: Final = ("auto", "cupti", "profiler", "off")


def main(arguments: list[str] | None = None) -> int:
    """``python -m headway.syncs``."""
    parser = argparse.ArgumentParser(prog="headway syncs", description=__doc__)
    parser.add_argument("--json", metavar="F", type=Path, help="write the findings and the timeline as JSON")
    parser.add_argument("--html", metavar="F", type=Path, help="write one self-contained page with a timeline")
    parser.add_argument(
        "--fail-on", metavar="N", type=int, help=f"exit with status {FAILED} at N or more waits not allowed"
    )
    parser.add_argument(
        "--allow", metavar="FILE", type=Path, help="TOML list of places where waiting is right, with reasons"
    )
    parser.add_argument("--simulate", action="store_true", help="pretend CUDA on a machine without it; no times")
    parser.add_argument("--driver", choices=DRIVERS, default="auto", help="how to watch the driver boundary")
    parser.add_argument("target", nargs="+", metavar="-- python script.py", help="what to run")
    given = parser.parse_args(arguments)
    return syncs(
        given.target, given.json, given.html, given.fail_on, given.allow, simulate=given.simulate, driver=given.driver
    )


def syncs(
    target: list[str],
    json_file: Path | None = None,
    html_file: Path | None = None,
    fail_on: int | None = None,
    allow_file: Path | None = None,
    *,
    simulate: bool = False,
    driver: str = "auto",
) -> int:
    """Run ``target`` in this process, watched; print the report to stderr; write the files asked for.

    Returns:
        The target's exit status; 2 if nothing could be run or watched; FAILED if ``fail_on`` waits were reached.
    """
    try:
        allow = AllowList.load(allow_file) if allow_file else AllowList()
        parse(target)
        if driver not in DRIVERS:
            raise UsageError(f"--driver {driver}: one of {', '.join(DRIVERS)}")
        run = _watch(target, allow, simulate, driver)
    except (ProbeError, AllowListError, UsageError) as error:
        sys.stderr.write(f"headway syncs: {error}\n")
        return 2
    run.notes += [f"allow list: {entry.file}:{entry.place} covered nothing" for entry in allow.unused]
    show(run)
    if json_file:
        write_json(run, json_file)
    if html_file:
        write_html(run, html_file)
    if fail_on is not None and run.log.count >= max(fail_on, 1):
        return FAILED
    return run.exit_status


def _watch(target: list[str], allow: AllowList, simulate: bool, driver: str) -> Run:
    from headway.syncs.profiler_probe import ProfilerRun

    probes, mode, notes = _probes(simulate, driver)
    log = Log(f"{probe.name}: {probe.watches}" for probe in probes)

    def hear(wait: Wait) -> None:
        log.add(allow.apply(wait))

    def enter() -> None:
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
        begin = time.perf_counter_ns()
        status = _run(target)
        wall = (time.perf_counter_ns() - begin) / 1000
        PROCESS.unwatch(hear)
    run = Run(target, mode, log, wall, {}, begin / 1000, started, notes, status)
    if profiler is not None:
        log.probes.append(f"{profiler.name}: {profiler.watches}")
        _merge(run, profiler, allow)
    return run


def _run(target: list[str]) -> int:
    try:
        return run_target(target)
    except KeyboardInterrupt:
        return 130
    except ProbeError:
        raise
    except Exception:
        traceback.print_exc()  # the report comes all the same
        return 1


def _probes(simulate: bool, driver: str) -> tuple[list[Probe], str, list[str]]:
    """What watches, under which name, with which limits.

    Raises:
        ProbeError: the probe asked for cannot be had.
    """
    if simulate:
        from headway.syncs.simulate import SimulationProbe

        return (
            [SimulationProbe()],
            "simulation",
            ["simulated: which calls would wait, not how long; no driver boundary"],
        )
    from headway.syncs.cupti_probe import CuptiProbe
    from headway.syncs.live import LiveProbe
    from headway.syncs.runtime import CudaRuntime

    runtime = CudaRuntime()
    runtime.require()
    if driver == "off":
        return (
            [LiveProbe(runtime)],
            "live",
            ["driver boundary not watched: waits inside extensions are not in this report"],
        )
    if driver in ("auto", "cupti"):
        probe = CuptiProbe()
        try:
            probe.attach(judge)
            probe.detach()
            return (
                [LiveProbe(runtime), probe],
                "cupti",
                ["CUPTI callbacks give no kernel times: GPU rows need --driver profiler"],
            )
        except ProbeError:
            if driver == "cupti":
                raise
    notes = [
        "torch.profiler's records: outside torch calls a line is that of the function's head, and allowed() does not reach"
    ]
    return [LiveProbe(runtime, annotate=True)], "profiler", notes


def _merge(run: Run, profiler: object, allow: AllowList) -> None:
    """Add the driver's waits on lines where no live probe saw one; take the streams from the trace."""
    from headway.syncs.profiler_probe import ProfilerRun

    assert isinstance(profiler, ProfilerRun)
    trace = profiler.require_proof()
    seen = {(finding.site.file, finding.site.line) for finding in run.log.findings}
    offset = run.start_micros - trace.begin
    for wait in trace.waits:
        if (wait.site.file, wait.site.line) not in seen:
            run.log.add(allow.apply(trace.shifted(wait, offset)))
    run.streams = {
        name: [(at + offset, duration, what) for at, duration, what in spans] for name, spans in trace.streams.items()
    }
