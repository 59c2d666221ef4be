"""Programs whose lines are labelled (bench/programs/syncs_published), each run under the simulation: which lines it names.

    python -m bench.syncs_lines [--files NAME ...] [--only WORD ...] [--json OUT.json] [--workers N]
    python -m bench.syncs_lines --card       # the same on a card, by the live guard and CUPTI: it judges the marks

A line that waits on a card ends in ``# waits``; no other line of those files waits. Precision and recall count lines: a
program that died has named the lines until then, and no more. Each program also runs on the CPU, with the same seed, and
has to end the same way (``bench/syncs_sweep.py``). On a card a program is run once to warm up, then under the live guard, under
CUPTI alone, and under both, whose lines are compared with the marks; the other two are scored beside.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bench import syncs_sweep

FOLDER = Path(__file__).parent / "programs" / "syncs_published"
MARK = "  # waits"
Line = tuple[str, int]
"""File name and line number."""


def labels(folder: Path = FOLDER) -> dict[Line, bool]:
    """Each line of the programs -> whether it waits."""
    return {
        (path.name, number): text.endswith(MARK)
        for path in sorted(folder.glob("*.py"))
        for number, text in enumerate(path.read_text().splitlines(), 1)
    }


def owners(folder: Path = FOLDER) -> dict[Line, str]:
    """Each line inside a function or class of a file -> its name."""
    return {
        (path.name, number): node.name
        for path in sorted(folder.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def programs_of(path: Path) -> list[str]:
    """The names of a file's programs, without running it."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [each.name for each in functions if [arg.arg for arg in each.args.args] == ["device"]]


def chosen(only: list[str], folder: Path = FOLDER, files: list[str] | None = None) -> dict[str, syncs_sweep.Program]:
    """file/name -> program, of ``files`` and of those whose name holds one of ``only``; all, if none is asked for."""
    found = {
        f"{path.stem}/{name}": program
        for path in sorted(folder.glob("*.py"))
        if not files or path.stem in files
        for name, program in syncs_sweep.programs(path.stem, folder).items()
    }
    return {name: program for name, program in found.items() if not only or any(word in name for word in only)}


def score(found: Iterable[Line], waits: Iterable[Line]) -> dict[str, Any]:
    """Precision and recall over lines, and the lines that were missed and named without cause."""
    named, labelled = set(found), set(waits)
    hits = len(named & labelled)
    return {
        "lines": len(labelled),
        "precision": round(hits / len(named), 3) if named else None,
        "recall": round(hits / len(labelled), 3) if labelled else None,
        "missed": sorted(labelled - named),
        "false_alarms": sorted(named - labelled),
    }


def report(lines: list[dict[str, Any]], names: Iterable[str], folder: Path = FOLDER) -> dict[str, Any]:
    """The score of ``lines``, what the sweep says of the programs ``names``; of a card's also each detector's by itself."""
    inside = owners(folder)
    ran = {(f"{name.partition('/')[0]}.py", name.partition("/")[2]) for name in names}
    left_out = {(path.name, name) for path in folder.glob("*.py") for name in programs_of(path)} - ran
    waits = [
        line
        for line, waiting in labels(folder).items()
        if waiting and (line[0], inside.get(line)) not in left_out and line[0] in {file for file, _ in ran}
    ]

    def scored(key: str) -> dict[str, Any]:
        own_reads = Path(syncs_sweep.__file__).name  # of results, when a program has ended
        found = {(each["file"], each["line"]) for line in lines for each in line.get(key, [])}
        made = score((place for place in found if place[0] != own_reads), waits)
        for kind in ("missed", "false_alarms"):
            made[kind] = [f"{file}:{number} {inside.get((file, number), '')}".strip() for file, number in made[kind]]
        return made

    others = (line for line in lines if line["verdict"] not in GOOD)
    bad = {line["name"]: f"{line['verdict']}: {line['why'].partition(chr(10))[0]}" for line in others}  # no traceback
    alone = {key: scored(key) for key in syncs_sweep.ALONE[syncs_sweep.CARD] if any(key in line for line in lines)}
    made = {"torch": torch.__version__, "programs": len(lines), **scored("findings"), "ended_otherwise": bad}
    return made | ({"alone": alone} if alone else {})


GOOD = ("same", "unproven")
"""Verdicts of the sweep on programs that ran to the same end; a program that only makes tensors may be ``unproven``."""


def card_name() -> str:
    """The card's, or nothing. Asked in a process of its own: one that has used a card cannot be forked."""
    ask = "import torch, cupti; print(torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="*", choices=sorted(path.stem for path in FOLDER.glob("*.py")))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--card", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    name = card_name() if given.card else ""
    if given.card and not name:
        parser.error("--card needs a CUDA device, and cupti-python: without them leave it out")
    wanted = chosen(given.only, files=given.files)
    lines: list[dict[str, Any]] = []
    made: dict[str, Any] = {}
    files = dict.fromkeys(name.partition("/")[0] for name in wanted)
    for file in files:  # the report is written after each: a run may be cut
        part = {name: program for name, program in wanted.items() if name.partition("/")[0] == file}
        lines += syncs_sweep.sweep(part, given.workers, syncs_sweep.CARD if given.card else syncs_sweep.SIMULATED)
        made = report(lines, [line["name"] for line in lines]) | ({"card": name} if name else {})
        if given.json:
            given.json.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made, indent=1))
    return int(bool(made["missed"] or made["false_alarms"] or made["ended_otherwise"]))


if __name__ == "__main__":
    sys.exit(main())
