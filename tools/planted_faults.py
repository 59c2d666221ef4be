"""How many planted faults the tests catch: each fault of a catalogue is put into a copy of the tree, and the checks run there.

    python tools/planted_faults.py                    all of tests/planted/faults.toml
    python tools/planted_faults.py NAME [NAME ...]    some of them
    python tools/planted_faults.py --baseline         the checks on the tree as it is, which must pass

A fault is one line replaced by another. It counts as caught when a check fails, and as caught as meant when the failure is of
the kind the catalogue expects. Exit status: 0 when all were caught, 1 when some were missed, 2 when a fault no longer fits its
file or the clean tree fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CATALOGUE = ROOT / "tests" / "planted" / "faults.toml"
CHECK_SECONDS = 180
_RAISED = re.compile(r"^(?:E\s+)?(?:[\w.]+\.)?(\w*(?:Error|Exception|Failed))\b(.*)$", re.MULTILINE)

_TOLD = re.compile(r"^E\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One wrong line.

    Attributes:
        file: below the root.
        old, new: the line that is there, without indentation, and what replaces it.
        what: the mistake in words.
        expect: errors one of which should report it; empty: any.
    """

    name: str
    file: str
    old: str
    new: str
    what: str
    expect: tuple[str, ...] = ()

    def planted(self, text: str) -> str:
        """``text`` with the fault. Raises ValueError unless exactly one line fits."""
        lines = text.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line.strip() == self.old]
        if len(places) != 1:
            raise ValueError(f"{self.name}: {len(places)} lines of {self.file} read {self.old!r}")
        line = lines[places[0]]
        indent = line[: len(line) - len(line.lstrip())]
        lines[places[0]] = f"{indent}{self.new}\n"
        return "".join(lines)


@dataclass
class Outcome:
    """What became of a fault."""

    fault: str
    caught: bool
    as_meant: bool
    error: str
    seconds: float


def load(path: Path = CATALOGUE) -> tuple[list[Fault], list[list[str]]]:
    """Faults, and the checks: module and arguments each, tried in order until one fails."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    faults = [Fault(**(each | {"expect": tuple(each.get("expect", ()))})) for each in data["fault"]]
    return faults, data["checks"]


def run_checks(folder: Path, checks: Sequence[Sequence[str]]) -> str | None:
    """The output of the first check that fails in ``folder``; None when all pass."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for check in checks:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *check],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=CHECK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"TimeoutError: {check[0]} took more than {CHECK_SECONDS} s"
        if done.returncode:
            return done.stdout + done.stderr
    return None


def copy_tree(folder: Path) -> None:
    """What the checks need of the checkout."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for part in ("headway", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)


def try_fault(fault: Fault, checks: Sequence[Sequence[str]]) -> Outcome:
    """Plant one fault in a fresh copy and run the checks."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy_tree(folder)
        target = folder / fault.file
        target.write_text(fault.planted(target.read_text(encoding="utf-8")), encoding="utf-8")
        output = run_checks(folder, checks)
    found = [f"{kind}{rest}" for kind, rest in _RAISED.findall(output or "")]
    wanted = [line for line in found if any(word in line for word in fault.expect)]
    told = _TOLD.findall(output or "")
    error = (wanted or found or told or ["?"])[0] if output else "missed"
    as_meant = bool(output) and (not fault.expect or bool(wanted))
    return Outcome(fault.name, output is not None, as_meant, error[:100], time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Count the planted faults that the tests catch.")
    parser.add_argument("names", nargs="*", help="faults to plant; all when none is named")
    parser.add_argument("--baseline", action="store_true", help="run the checks on the clean tree only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    options = parser.parse_args(arguments)
    faults, checks = load()
    if options.baseline:
        output = run_checks(ROOT, checks)
        print(output or "the clean tree passes")
        return 2 if output else 0
    if options.names:
        faults = [fault for fault in faults if fault.name in options.names]
    for fault in faults:
        try:
            fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            print(error)
            return 2
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda fault: try_fault(fault, checks), faults):
            outcomes.append(outcome)
            word = "caught" if outcome.as_meant else "caught, not as meant" if outcome.caught else "MISSED"
            print(f"{outcome.fault:32} {word:20} {outcome.seconds:5.0f} s  {outcome.error}", flush=True)
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught, {sum(outcome.as_meant for outcome in outcomes)} as meant")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
