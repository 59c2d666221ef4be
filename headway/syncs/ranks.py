"""What each rank of a launcher saw, as a file; and all of them as one run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from headway.syncs.errors import ProbeError
from headway.syncs.findings import MAX_WAITS, Finding, Kind, Log, Wait
from headway.syncs.launchers import Launch
from headway.syncs.places import Site
from headway.syncs.report import Run

FOLDER: Final = "HEADWAY_SYNCS_RANKS"
"""The variable that tells a rank where its file goes."""
_VERSION: Final = 1


def folder() -> Path | None:
    """Where this process's file goes, if it is a rank of a launch that is watched."""
    found = os.environ.get(FOLDER)
    return Path(found) if found else None


def write(run: Run, where: Path) -> None:
    """Leave ``run`` in ``where``: one file for each rank, the last try's where a launcher tries again."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    findings = run.log.findings
    number = {_key(finding): index for index, finding in enumerate(findings)}
    waits = [
        [number[_key(wait)], wait.micros, wait.start_ns, wait.thread] for wait in run.log.waits[: MAX_WAITS // world]
    ]
    about = {field: getattr(run, field) for field in _PLAIN}
    data = {
        "version": _VERSION,
        "rank": rank,
        "world": world,
        "run": about,
        "probes": run.log.probes,
        "unkept": run.log.unkept + len(run.log.waits) - len(waits),
        "findings": [_plain(finding) for finding in findings],
        "waits": waits,
    }
    file = where / f"rank-{rank}.json"
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(file)


_PLAIN: Final = (
    "mode", "wall_micros", "streams", "start_micros", "subprocesses", "notes", "exit_status", "unread", "unproven",
    "started",
)  # fmt: skip


def _key(seen: Wait | Finding) -> tuple[Any, ...]:
    return seen.site, seen.kind, seen.call, seen.reason, seen.via


def _plain(finding: Finding) -> dict[str, Any]:
    return dataclasses.asdict(finding) | {"threads": sorted(finding.threads)}


def launch(made: Launch, own: list[str], words: list[str]) -> Run:
    """Run a launcher to its end; the ranks' runs as one, the launcher's exit status with it.

    Raises:
        ProbeError: no rank could be watched.
    """
    with tempfile.TemporaryDirectory(prefix="headway-syncs-") as name:
        with _ended(subprocess.Popen(made.command(own), env=os.environ | {FOLDER: name})) as process:
            status = process.wait()
        files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(name).glob("rank-*.json"))]
    if not files:
        raise ProbeError(f"{made.module} ended with status {status} before any rank was watched")
    return merged(files, words, status)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the launcher when we are interrupted: it ends its ranks, which leave what they found."""
    try:
        yield process
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.terminate()
        raise


def merged(files: list[dict[str, Any]], words: list[str], status: int) -> Run:
    """One run of several ranks: findings of the same line are one, threads and streams carry their rank.

    Args:
        files: what ``write`` left.
        words: the command, as it was given.
        status: the launcher's.
    """
    files = sorted(files, key=lambda data: int(data["rank"]))
    world = max(int(data["world"]) for data in files)
    log = Log(dict.fromkeys(probe for data in files for probe in data["probes"]))
    for data in files:
        _add(log, data)
    runs = [data["run"] for data in files]
    start = min(run["start_micros"] for run in runs)
    end = max(run["start_micros"] + run["wall_micros"] for run in runs)
    run = Run(words, runs[0]["mode"], log, end - start, start_micros=start, exit_status=status)
    run.unread = sum(each["unread"] for each in runs)
    run.started = max(each["started"] for each in runs)
    for data, each in zip(files, runs, strict=True):
        rank = f"rank {data['rank']}"
        run.streams |= {f"{rank}, {name}": [(a, d, n) for a, d, n in spans] for name, spans in each["streams"].items()}
        run.subprocesses += [f"{rank}: {child}" for child in each["subprocesses"]]
        run.unproven += [f"{rank}: {reason}" for reason in each["unproven"]]
    seen = {int(data["rank"]) for data in files}
    if missing := [str(rank) for rank in range(world) if rank not in seen]:
        run.unproven.append(f"of {world} ranks these left no report: {', '.join(missing)}")
    everywhere = [note for note in runs[0]["notes"] if all(note in each["notes"] for each in runs)]
    run.notes = [f"{len(files)} ranks of {world} watched, each by itself; counts are sums", *everywhere]
    return run


def _add(log: Log, data: dict[str, Any]) -> None:
    """One rank's findings and waits."""
    rank, world = data["rank"], max(int(data["world"]), 1)
    found: list[Wait] = []
    for plain in data["findings"]:
        site, kind = Site(**plain["site"]), Kind(plain["kind"])
        rest = {name: plain[name] for name in ("via", "within", "count", "micros", "timed")}
        threads = {f"rank {rank} {thread}" for thread in plain["threads"]}
        steps = {int(step): count for step, count in plain["steps"].items()}
        stack = tuple(plain["stack"])
        finding = Finding(
            site, kind, plain["call"], plain["reason"], plain["detector"], stack, threads=threads, steps=steps, **rest
        )
        log.join(finding)
        found.append(Wait(site, kind, plain["call"], None, 0, "", plain["detector"], plain["reason"], stack))
    log.unkept += data["unkept"]
    for index, micros, start, thread in data["waits"][: MAX_WAITS // world]:
        log.waits.append(
            dataclasses.replace(found[index], micros=micros, start_ns=start, thread=f"rank {rank} {thread}")
        )
    log.waits.sort(key=lambda wait: wait.start_ns)
