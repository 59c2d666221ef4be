"""The result of a run as one data model, for --json and for the HTML page, and as a table for people."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections import Counter, defaultdict
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Final

from headway.syncs.findings import Finding, Log
from headway.syncs.fixes import cure_of
from headway.syncs.places import short
from headway.syncs.timeline import Spans, build

MAX_SOURCE: Final = 100
"""Characters of a line of code in the text report."""
VERSION: Final = 2
"""Of the JSON's shape; rises when a field changes its meaning."""


@dataclasses.dataclass
class Run:
    """A finished run.

    Attributes:
        command: the target and its arguments.
        mode: which probes watched: live, cupti, profiler, simulation.
        log: the waits.
        wall_micros: from start to end.
        streams: stream name -> (start, duration, name) in microseconds; empty where nothing recorded the device.
        start_micros: the moment the run began, in the clock of the waits.
        subprocesses: processes that the target started and that were not watched.
        notes: limits of this run, in plain words.
        exit_status: of the target.
        unread: pieces of device work that ``streams`` lacks because there were too many, the last ones.
        unproven: why an empty list would prove nothing: no tensor reached the device, a probe broke off.
        started: steps that the program began with ``syncs.step()``.
    """

    command: list[str]
    mode: str
    log: Log
    wall_micros: float
    streams: Spans = dataclasses.field(default_factory=dict)
    start_micros: float = 0.0
    subprocesses: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    exit_status: int = 0
    unread: int = 0
    unproven: list[str] = dataclasses.field(default_factory=list)
    started: int = 0


def to_dict(run: Run) -> dict[str, Any]:
    """The data model. Times in microseconds, from the start of the run."""
    findings = run.log.findings
    timeline = build(run.log.waits, run.streams, run.start_micros, run.wall_micros)
    busy = timeline["busy_micros"] if not run.unread else None
    return {
        "version": VERSION,
        "command": run.command,
        "mode": run.mode,
        "probes": run.log.probes,
        "exit_status": run.exit_status,
        "unproven": run.unproven,
        "steps": run.started,
        "python": platform.python_version(),
        "torch": _torch_version(),
        "wall_micros": round(run.wall_micros, 1),
        "gpu": None if busy is None else {"busy_micros": busy, "busy_percent": _percent(busy, run.wall_micros)},
        "totals": {
            "unsanctioned": run.log.count,
            "lines": run.log.lines,
            "sanctioned": sum(finding.count for finding in run.log.sanctioned),
            "micros_lost": _lost(run.log.unsanctioned),
            "micros_sanctioned": _lost(run.log.sanctioned),
        },
        "findings": [finding.to_dict() | {"when": when(finding, run.started)} for finding in findings],
        "lines": _lines(findings),
        "groups": groups(run.log.unsanctioned),
        "subprocesses": run.subprocesses,
        "notes": run.notes + _limits(run, timeline["hidden"]),
        "timeline": timeline,
    }


def _limits(run: Run, hidden: dict[str, int]) -> list[str]:
    """What the timeline leaves out."""
    said = [f"timeline: {name}: {number:,} more not shown; sums are exact" for name, number in hidden.items()]
    if run.log.unkept:
        said.append(f"timeline: {run.log.unkept:,} more waits not shown; sums are exact")
    if run.unread:
        said.append(
            f"timeline: {run.unread:,} more pieces of GPU work not shown, nor in any sum: it was too much to keep"
        )
    return said


def _lost(findings: list[Finding]) -> float | None:
    """The sum; None where there were waits and none was timed."""
    if findings and not any(finding.timed for finding in findings):
        return None
    return round(sum(finding.micros for finding in findings), 1)


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1) if whole > 0 else 0.0


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"


def _lines(findings: list[Finding]) -> list[dict[str, Any]]:
    """Per line of code: waits and time, the most expensive first."""
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0.0])
    for finding in findings:
        entry = sums[finding.site.file, finding.site.line]
        entry[0] += finding.count
        entry[1] += finding.micros
    rows = [
        {"file": short(f), "line": n, "count": int(c), "micros": round(m, 1) if m else None}
        for (f, n), (c, m) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-float(row["micros"] or 0), -int(row["count"])))


def write_json(run: Run, path: Path) -> None:
    """Write the data model."""
    path.write_text(json.dumps(to_dict(run), indent=1) + "\n", encoding="utf-8")


def write_html(run: Run, path: Path) -> None:
    """Write one self-contained page: styles, script and data inside, no request to anywhere."""
    page = resources.files("headway.syncs").joinpath("report.html").read_text(encoding="utf-8")
    # In a script element only "</" and "<!--" can end or derail the data.
    data = json.dumps(to_dict(run), separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(page.replace("/*DATA*/null", data), encoding="utf-8")


def table(log: Log) -> str:
    """Findings as text: the user's line, what it went through, its cure."""
    lines = []
    for finding in log.findings:
        data = finding.to_dict()
        lost = f"{finding.micros:12,.0f} us" if finding.timed else "   (not timed)"
        place = f"{data['file']}:{finding.site.line}" if finding.site.line else data["file"]
        lines.append(f"{lost} {finding.count:7}x  {place}  {finding.call} ({finding.kind})")
        if data["source"]:
            lines.append(f"{'|':>25}  {data['source'][:MAX_SOURCE]}")
        if data["via"]:
            lines.append(f"{'through:':>27} {data['via']}")
        if finding.steps:
            lines.append(f"{'when:':>27} {phase(finding)}")
        if finding.reason is not None:
            lines.append(f"{'allowed:':>27} {finding.reason}")
        else:
            fix = cure_of(finding)
            lines.append(f"{'cure:':>27} {fix.name}. {fix.advice}")
    return "\n".join(lines) if lines else "no host waits"


def when(finding: Finding, steps: int) -> str:
    """Start-up or steady state; empty where the program had no ``steps``, which ``syncs.step()`` begins."""
    if not steps:
        return ""
    return phase(finding) if finding.steps else "start-up: before the first step"


def phase(finding: Finding) -> str:
    """In which steps it waited."""
    first = finding.steps.get(1, 0)
    later = {step: count for step, count in finding.steps.items() if step > 1}
    if not later:
        return f"start-up: {first}x in step 1 and never after"
    steps = "1 step" if len(later) == 1 else f"{len(later)} steps"
    return f"steady state: in {steps} after the first, {sum(later.values()) / len(later):.3g}x each"


def groups(findings: list[Finding]) -> dict[str, dict[str, int]]:
    """Waits by kind, and by the package they went through ("" is the program itself)."""
    by: dict[str, Counter[str]] = {"kind": Counter(), "package": Counter()}
    for finding in findings:
        by["kind"][str(finding.kind)] += finding.count
        by["package"][finding.to_dict()["package"]] += finding.count
    return {name: dict(counts.most_common()) for name, counts in by.items()}


def summary(run: Run) -> str:
    """What the command prints at the end."""
    data = to_dict(run)
    totals = data["totals"]
    waits, lines = totals["unsanctioned"], totals["lines"]
    parts = [f"\nheadway syncs ({run.mode}): {waits} waits on {lines} lines, {_text(totals['micros_lost'])} lost"]
    parts[0] += f"; {totals['sanctioned']} allowed, {_text(totals['micros_sanctioned'])}"
    parts += [f"  watched by {probe}" for probe in run.log.probes]
    kinds, packages = data["groups"]["kind"], data["groups"]["package"]
    if len(kinds) > 1 or len(packages) > 1:
        parts.append("  by kind: " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
        through = ", ".join(f"{name or 'own code'} {count}" for name, count in packages.items())
        parts.append("  through: " + through)
    parts += [table(run.log)]
    if run.subprocesses:
        parts.append(
            f"NOT watched: {len(run.subprocesses)} child process(es) of the target, which this tool does not follow:"
        )
        parts += [f"  {child}" for child in run.subprocesses[:10]]
    parts += [f"note: {note}" for note in data["notes"]]
    parts += [f"PROVES NOTHING: {reason}" for reason in run.unproven]
    return "\n".join(parts)


def _text(micros: float | None) -> str:
    return "time unknown" if micros is None else f"{micros:,.0f} us"


def show(run: Run) -> None:
    """Print the summary to stderr: stdout is the target's."""
    sys.stderr.write(summary(run) + "\n")
