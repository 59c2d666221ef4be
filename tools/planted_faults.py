"""How many planted faults the tests catch: each fault of a catalogue is put into a copy of the tree, and checks run there.

    python tools/planted_faults.py                        all of tests/planted/faults.toml
    python tools/planted_faults.py NAME [NAME ...]        some of them
    python tools/planted_faults.py --faults FILE          a catalogue that somebody else wrote
    python tools/planted_faults.py --batch NAME           a batch held out: tests/planted/batches/NAME.toml
    python tools/planted_faults.py --baseline             only the checks on the tree as it is
    python tools/planted_faults.py --json OUT --markdown docs/planted-faults.md
    python tools/planted_faults.py --from OUT [OUT ...] --markdown docs/planted-faults.md     write the page, run nothing

The checks run on a copy without a fault first: where one fails there, its failures would say nothing, and no fault is tried.
A fault is one line replaced by another. The check that is meant to catch it runs first, then the others in the catalogue's
order, then the whole test folders of the floor it is in, until one fails: "caught" means what CI sees. It counts as caught when
a check fails, and as caught as meant when the failure is of the kind the catalogue expects.

A batch is a catalogue of faults that nobody wrote tests for (``tools/draw_faults.py`` draws some). Its first outcomes are kept
beside it, in NAME.json, and never overwritten: a second run takes up where the first was ended, and a third does nothing.
``--again`` tries a batch anew, for what is caught now. Its faults start with the folders of their floor. ``--budget`` ends a
fault's checks after so many seconds, but never before its first; what was not caught by then counts as missed. ``--bound`` is
for one run of pytest a fault, of all that CI runs of its floor, and how many seconds that may take.

 A catalogue is TOML: ``[checks]`` of name = ["module", "argument", ...] (run as ``python -m``; without the
table those of tests/planted/faults.toml are taken) and ``[[fault]]`` tables with the fields of ``Fault``. Exit status: 0 when
all were caught, 1 when some were missed, 2 when a fault does not fit its file or the clean tree fails.
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
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.planted_floors import PYTEST, ROOT, folders, nearest

CATALOGUE = ROOT / "tests" / "planted" / "faults.toml"
BATCHES = ROOT / "tests" / "planted" / "batches"
CHECK_SECONDS = 600
"""A fault may make the engine turn for ever; a check that takes this long counts as failed."""
_RAISED = re.compile(r"^(?:E\s+)?(?:[\w.]+\.)?(\w*(?:Error|Exception|Failed))\b(.*)$", re.MULTILINE)
_TOLD = re.compile(r"^E\s+(.*)$", re.MULTILINE)
_TEST = re.compile(r"^FAILED (\S+)|^again: python -m (tests\.sim\.replay \d+)", re.MULTILINE)

Checks = Mapping[str, Sequence[str]]
Says = Callable[[str, Sequence[str], str], bool]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One wrong line.

    Attributes:
        file: below the root.
        old, new: the line that is there, without indentation, and what replaces it.
        what: the mistake in words.
        check: the check that is meant to catch it; empty: the first.
        expect: errors one of which should report it; empty: any.
        uncaught: why no check can catch it, for a fault that is known to slip through.
        round: "grown" for faults that the tests were written with; else the round in which it was held out.
        first: for held-out faults, what their first run gave, before any test was added: "caught" or "missed".
        cure: for held-out faults that nothing caught, what was done about their class.
    """

    name: str
    file: str
    old: str
    new: str
    what: str
    check: str = ""
    expect: tuple[str, ...] = ()
    uncaught: str = ""
    round: str = "grown"
    first: str = ""
    cure: str = ""

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
    """What became of a fault.

    Attributes:
        check: name of the check that failed; empty when all passed.
        test: the test or scenario in it.
    """

    fault: str
    caught: bool
    as_meant: bool
    check: str
    test: str
    error: str
    seconds: float


Batch = tuple[str, list[Fault], dict[str, Outcome], dict[str, Outcome]]


def load(path: Path = CATALOGUE) -> tuple[list[Fault], Checks]:
    """Faults, and the checks by name.

    Raises:
        ValueError: a fault names a check that is not there.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = {"round": data.get("round", "grown")}
    faults = [Fault(**(shared | each | {"expect": tuple(each.get("expect", ()))})) for each in data["fault"]]
    checks: Checks = data.get("checks") or load()[1]
    for fault in faults:
        if fault.check and fault.check not in checks:
            raise ValueError(f"{fault.name}: there is no check {fault.check!r}, only {', '.join(checks)}")
    return faults, checks


def ordered(fault: Fault, checks: Checks, folders_first: bool = False) -> Iterator[tuple[str, Sequence[str]]]:
    """All checks, the one that is meant to catch it first, then the folders; those first for a fault that none is meant for."""
    if folders_first and not fault.check:
        yield from folders(fault.file)
        yield from checks.items()
        return
    first = fault.check or next(iter(checks))
    yield first, checks[first]
    yield from ((name, check) for name, check in checks.items() if name != first)
    yield from folders(fault.file)


def run_check(folder: Path, check: Sequence[str]) -> str | None:
    """The output of a check that fails in ``folder``; None when it passes."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
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
    output = done.stdout + done.stderr
    ended = "session-timeout:" in output and not _TEST.search(output)  # --bound is over, and nothing had failed
    return output if done.returncode and not ended else None


def copy_tree(folder: Path) -> None:
    """What the checks need of the checkout: all of it, since tests read what it says of itself, too."""
    ignore = shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".*cache", ".hypothesis", "build", "dist")
    shutil.copytree(ROOT, folder, ignore=ignore, dirs_exist_ok=True)


def clean_tree_fails(checks: Checks) -> str | None:
    """What fails without any fault, in a copy as the faults get it; None when nothing does."""
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        copy_tree(Path(place))
        for name, check in checks.items():
            output = run_check(Path(place), check)
            if output is not None:
                return f"{output}\nthe check {name!r} fails on the clean tree"
    return None


class CleanTree:
    """Whether what failed with a fault passes without one; asked once for each test, when it first fails."""

    def __init__(self, known: Checks) -> None:
        self._passes = dict.fromkeys(known, True)  # main has run these
        self._lock = threading.Lock()

    def passes(self, name: str, check: Sequence[str], output: str) -> bool:
        """Run the test that failed according to ``output``, or else the whole check, on a fresh copy, unless that was done."""
        if name in self._passes:
            return True
        test = next(
            (first.partition("[")[0] for first, _ in _TEST.findall(output) if first), ""
        )  # an id may hold spaces
        asked = (*PYTEST, test) if test else check
        with self._lock:
            if asked[-1] not in self._passes:
                self._passes[asked[-1]] = clean_tree_fails({name: asked}) is None
                if not self._passes[asked[-1]]:
                    print(f"{asked[-1]} fails on the clean tree: it says nothing", flush=True)
            return self._passes[asked[-1]]


def try_fault(fault: Fault, checks: Iterable[tuple[str, Sequence[str]]], says: Says, budget: float = 1e9) -> Outcome:
    """Plant one fault in a fresh copy and run the checks until one fails, or until ``budget`` seconds are over.

    Args:
        says: whether a check's failure says something, given its name, its arguments and its output.
    """
    start = time.monotonic()
    output, caught_by = None, ""
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        folder = Path(place)
        copy_tree(folder)
        target = folder / fault.file
        target.write_text(fault.planted(target.read_text(encoding="utf-8")), encoding="utf-8")
        begun = None
        for name, check in checks:
            if begun is not None and time.monotonic() - begun > budget:
                break
            begun = begun or time.monotonic()
            output = run_check(folder, check)
            if output is not None and says(name, check, output):
                caught_by = name
                break
            output = None
    seconds = time.monotonic() - start
    if output is None:
        return Outcome(fault.name, False, False, "", "", "missed", seconds)
    test, error = failure(output.replace(f"{folder}/", ""), fault.expect)
    as_meant = not fault.expect or any(word in error for word in fault.expect)
    return Outcome(fault.name, True, as_meant, caught_by, test, error[:100], seconds)


def failure(output: str, expect: Sequence[str] = ()) -> tuple[str, str]:
    """The test that failed and its error, preferably an expected one; empty, or "?", where the output names none."""
    found = [f"{kind}{rest}" for kind, rest in _RAISED.findall(output)]
    wanted = [line for line in found if any(word in line for word in expect)]
    error = (wanted or found or _TOLD.findall(output) or ["?"])[0]
    return next((first or second for first, second in _TEST.findall(output)), ""), error


def page(
    faults: Sequence[Fault], outcomes: Mapping[str, Outcome], checks: Checks, batches: Sequence[Batch] = ()
) -> str:
    """docs/planted-faults.md."""
    ran = [fault for fault in faults if fault.name in outcomes]
    caught = [fault for fault in ran if outcomes[fault.name].caught]
    minutes = sum(outcomes[fault.name].seconds for fault in ran) / 60  # several run at a time
    lines = [
        "# Planted faults",
        "",
        "Written by `tools/planted_faults.py`; do not edit. Each fault is one wrong line, put into a copy of the tree; the",
        f"check meant to catch it runs first. **{len(caught)} of {len(ran)} caught**, in {minutes:.0f} minutes of work.",
        "",
        "```",
        "python tools/planted_faults.py                    all of tests/planted/faults.toml (make faults)",
        "python tools/planted_faults.py --faults FILE      faults of somebody else's; format: the tool's docstring",
        "```",
        "",
        *_rounds(ran, outcomes),
        *(f"| {_batch_row(batch)} |" for batch in batches),
        "",
        "| check | `python -m` |",
        "|---|---|",
        *(f"| {name} | `{' '.join(check)}` |" for name, check in checks.items()),
    ]
    missed = [fault for fault in ran if not outcomes[fault.name].caught]
    lines += ["", "## Not caught", ""]
    lines += [f"- `{fault.name}` ({fault.file}): {fault.what}. {fault.uncaught}" for fault in missed] or ["None."]
    lines += ["", "## Caught", "", "| fault | where | mistake | check | reported as |", "|---|---|---|---|---|"]
    for fault in caught:
        outcome = outcomes[fault.name]
        where = f"`{fault.file.removeprefix('headway/')}`"
        error = outcome.error.replace("|", "\\|").replace("`", "'")
        error = re.sub(r"/\S*/(?=tests/|headway/)", "", error)
        lines.append(f"| {fault.name} | {where} | {fault.what} | {outcome.check} | {error} |".replace("{", "&#123;"))
    waiting = ", ".join(f"`{fault.name}`" for fault in faults if fault.name not in outcomes)
    if waiting and batches:
        lines += ["", *textwrap.wrap(f"Not run since they were added: {waiting}.", 130, break_on_hyphens=False)]
    return "\n".join(lines + [line for batch in batches for line in _batch_section(*batch)]) + "\n"


def _outcomes(path: Path) -> dict[str, Outcome]:
    """By fault; none where there is no such file."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {each["fault"]: Outcome(**each) for each in known}


def _batches() -> list[Batch]:
    """Batches that have run: name, faults, first outcomes, later outcomes of what was missed."""
    found = []
    for path in sorted(BATCHES.glob("*.toml")):
        faults, first = load(path)[0], _outcomes(path.with_suffix(".json"))
        if first:
            found.append((path.stem, faults, first, _outcomes(path.with_suffix(".now.json"))))
    return found


def _batch_row(batch: Batch) -> str:
    _, faults, first, later = batch
    at_first = sum(outcome.caught for outcome in first.values())
    now = sum(first[name].caught or (name in later and later[name].caught) for name in first)
    return f"held out, {faults[0].round} | {len(first)} | {at_first} of {len(first)} | {now}"


def _batch_section(
    name: str, faults: Sequence[Fault], first: Mapping[str, Outcome], later: Mapping[str, Outcome]
) -> list[str]:
    """What became of a batch at its first run, and what was done about what nothing caught."""
    at_first = sum(outcome.caught for outcome in first.values())
    lines = [
        "",
        f"## Held out, {faults[0].round}",
        "",
        f"`tests/planted/batches/{name}.toml`, run once with `--batch {name}`:",
    ]
    if len(first) < len(faults):
        lines[-1] += f" {len(first)} of its {len(faults)} faults have had their first run so far."
    lines += [f"**{at_first} of {len(first)} caught at their first run.**"]
    if at_first < len(first):
        lines += ["What was not, and what was done about it:", ""]
        lines += ["| fault | where | mistake | cure | caught now by |", "|---|---|---|---|---|"]
    for fault in faults:
        if fault.name in first and not first[fault.name].caught:
            by = later[fault.name].check if fault.name in later and later[fault.name].caught else "nothing"
            lines.append(
                f"| {fault.name} | `{fault.file.removeprefix('headway/')}` | {fault.what} | {fault.cure} | {by} |"
            )
    lines += ["", "| caught | where | mistake | by |", "|---|---|---|---|"]
    for fault in faults:
        if fault.name in first and first[fault.name].caught:
            by = first[fault.name].test or first[fault.name].check
            lines.append(f"| {fault.name} | `{fault.file.removeprefix('headway/')}` | {fault.what} | `{by[:110]}` |")
    return lines


def _rounds(ran: Sequence[Fault], outcomes: Mapping[str, Outcome]) -> list[str]:
    """How each round of faults did: those the tests grew with, and those held out."""
    lines = ["| faults | number | caught at their first run | caught now |", "|---|---|---|---|"]
    for name in dict.fromkeys(fault.round for fault in ran):
        ours = [fault for fault in ran if fault.round == name]
        now = sum(outcomes[fault.name].caught for fault in ours)
        first = sum(fault.first == "caught" for fault in ours)
        shown = f"{first} of {len(ours)}" if any(fault.first for fault in ours) else "-"
        label = "grown together with the tests" if name == "grown" else f"held out, {name}"
        lines.append(f"| {label} | {len(ours)} | {shown} | {now} |")
    return lines


def run_all(
    faults: Sequence[Fault], checks: Checks, jobs: int, held_out: bool, budget: float, bound: float = 0.0
) -> Iterator[Outcome]:
    """Try every fault, and say how it went."""
    clean = CleanTree({} if held_out else checks)

    def tried(fault: Fault) -> Outcome:
        its = [nearest(fault.file, bound)] if bound else ordered(fault, checks, held_out)
        return try_fault(fault, its, clean.passes, budget)

    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(tried, faults):
            word = "caught" if outcome.as_meant else "caught, not as meant" if outcome.caught else "MISSED"
            print(
                f"{outcome.fault:32} {word:20} {outcome.seconds:5.0f} s  {outcome.check:10} {outcome.error}", flush=True
            )
            yield outcome


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Count the planted faults that the tests catch.")
    parser.add_argument("names", nargs="*", help="faults to plant; all when none is named")
    parser.add_argument("--faults", type=Path, default=CATALOGUE, help="another catalogue")
    parser.add_argument("--batch", help="a batch held out, by name; its first outcomes are kept")
    parser.add_argument("--again", action="store_true", help="try a batch anew; its first outcomes stay")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further check begins")
    parser.add_argument(
        "--bound", type=float, default=0.0, help="seconds for one run of all that concerns a fault's file"
    )
    parser.add_argument("--baseline", action="store_true", help="run the checks on the clean tree only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the outcomes there, after each fault")
    parser.add_argument("--markdown", type=Path, help="write the page there")
    parser.add_argument("--from", dest="known", type=Path, nargs="+", help="outcomes of former runs; nothing is run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    options = parsed(arguments)
    held_out = options.batch is not None
    if held_out:
        options.faults = BATCHES / f"{options.batch}.toml"
        options.json = options.json or (None if options.again else options.faults.with_suffix(".json"))
    try:
        faults, checks = load(options.faults)
        unknown = set(options.names) - {fault.name for fault in faults}
        if unknown:
            raise ValueError(f"{options.faults} has no fault {', '.join(sorted(unknown))}")
        for fault in faults:
            fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        print(error)
        return 2
    if not options.known and not held_out:  # of a batch, checks are tried on the clean tree when they fail
        failed = clean_tree_fails(checks)
        print(failed or "the clean tree passes", flush=True)
        if failed or options.baseline:
            return 2 if failed else 0
    if options.names:
        faults = [next(fault for fault in faults if fault.name == name) for name in options.names]
    outcomes: dict[str, Outcome] = {}
    if held_out and not options.again and options.json.exists():
        outcomes = {each["fault"]: Outcome(**each) for each in json.loads(options.json.read_text(encoding="utf-8"))}
    if options.known:
        for path in options.known:
            outcomes |= {each["fault"]: Outcome(**each) for each in json.loads(path.read_text(encoding="utf-8"))}
    else:
        left = [fault for fault in faults if fault.name not in outcomes]
        for outcome in run_all(left, checks, options.jobs, held_out, options.budget, options.bound):
            outcomes[outcome.fault] = outcome
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in outcomes.values()], indent=1) + "\n")
    if options.markdown:
        batches = _batches() if options.faults == CATALOGUE else []
        options.markdown.write_text(page(faults, outcomes, checks, batches), encoding="utf-8")
    ran = [outcomes[fault.name] for fault in faults if fault.name in outcomes]
    caught = sum(outcome.caught for outcome in ran)
    print(f"{caught} of {len(ran)} caught, {sum(outcome.as_meant for outcome in ran)} as meant")
    return 0 if caught == len(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
