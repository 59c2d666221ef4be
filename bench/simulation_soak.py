"""Thousands of random scenarios of the engine on the simulated device, in as many sittings as it takes.

    python bench/simulation_soak.py --number 2000 --json bench/reports/proof/simulation-soak.json [--seconds 600]

A scenario is one number: requests, arrivals, aborts, sizes, run-ahead, delays of the device. Every answer is compared with
the synchronous oracle's; a host wait, a race or a broken invariant raises. Seeds begin at ``--first`` and go on where the
report ends, so a run that was cut off, by ``--seconds`` or by hand, is continued by the same command. A failing seed is kept
with the one command that plays it again, and the others go on; each sitting begins with those that failed in earlier ones, and
counts them as mended when they pass. Exit status 1 if any fails still; CPU time is this process's.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.sim.harness import SMALL_SEEDS, play

FIRST = 2 * SMALL_SEEDS
"""Above the seeds of every other test, and of the large kind."""
SAVE_EVERY = 20
MAX_ERROR = 300
"""Characters kept of an error."""


@dataclass
class Report:
    """What was played.

    Attributes:
        first, number: the seeds played are first, first + 1, ...: so many.
        cpu_seconds: of all sittings.
        failed: seed, error and command of each that fails.
        mended: the same of those that failed in an earlier sitting and pass now.
    """

    first: int
    number: int = 0
    cpu_seconds: float = 0.0
    torch: str = torch.__version__
    failed: list[dict[str, Any]] = field(default_factory=list)
    mended: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, first: int) -> Report:
        """The report to go on with; a new one where there is none.

        Raises:
            ValueError: the report there is of other seeds.
        """
        if not path.exists():
            return cls(first)
        found = cls(**json.loads(path.read_text(encoding="utf-8")))
        if found.first != first:
            raise ValueError(
                f"{path} begins at seed {found.first}, not {first}: give --first {found.first}, or another file"
            )
        return found


def go_on(report: Report, number: int, seconds: float, save: Callable[[], None]) -> None:
    """Play until ``number`` seeds were played in all, or ``seconds`` passed."""
    end = time.monotonic() + seconds
    former, report.failed = report.failed, []
    for each in former:
        wrong = _play(each["seed"])
        (report.failed if wrong else report.mended).append(wrong or each)
    while report.number < number and time.monotonic() < end:
        begin = time.process_time()
        wrong = _play(report.first + report.number)
        report.failed += [wrong] if wrong else []
        report.cpu_seconds = round(report.cpu_seconds + time.process_time() - begin, 2)
        report.number += 1
        if report.number % SAVE_EVERY == 0:
            save()
            print(f"{report.number} played, {len(report.failed)} failed, {report.cpu_seconds:.0f} s of CPU", flush=True)
    save()


def _play(seed: int) -> dict[str, Any] | None:
    """None, or what the report says of a failure."""
    try:
        play(seed)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
        again = f"python -m tests.sim.replay {seed}"
        print(f"seed {seed} failed: {wrong}\n  again: {again}", flush=True)
        return {"seed": seed, "error": wrong[:MAX_ERROR], "again": again}
    return None


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--number", type=int, default=2000, help="scenarios in all, those of earlier sittings included")
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this sitting")
    given = parser.parse_args(arguments)
    report = Report.load(given.json, given.first)
    go_on(report, given.number, given.seconds, lambda: _save(report, given.json))
    print(f"{report.number - len(report.failed)} of {report.number} scenarios passed")
    return int(bool(report.failed))


def _save(report: Report, path: Path) -> None:
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":  # what follows is for the whole process, which may be the tests'
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.exit(main())
