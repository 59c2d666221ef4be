"""Programs whose lines are labelled (bench/programs/syncs_published), each run under the simulation: which lines it names.

    python -m bench.syncs_lines [--only WORD ...] [--json OUT.json]
    python -m bench.syncs_lines --card       # the same on a card, by the live guard and CUPTI: it judges the marks

A line that waits on a card ends in ``# waits``; no other line of those files waits. Precision and recall count lines: a
program that died has named the lines until then, and no more. Each program also runs on the CPU, with the same seed, and
has to end the same way (``bench/syncs_sweep.py``).
"""

from __future__ import annotations

import argparse
import ast
import json
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


def chosen(only: list[str], folder: Path = FOLDER) -> dict[str, syncs_sweep.Program]:
    """file/name -> program, of those whose name holds one of ``only``; all, if none is asked for."""
    found = {
        f"{path.stem}/{name}": program
        for path in sorted(folder.glob("*.py"))
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
    """The score of ``lines``, what the sweep says of the programs ``names``."""
    inside = owners(folder)
    ran = {(f"{name.partition('/')[0]}.py", name.partition("/")[2]) for name in names}
    left_out = {(path.name, name) for path in folder.glob("*.py") for name in programs_of(path)} - ran
    waits = [
        line
        for line, waiting in labels(folder).items()
        if waiting and (line[0], inside.get(line)) not in left_out and line[0] in {file for file, _ in ran}
    ]
    own_reads = Path(syncs_sweep.__file__).name  # of results, when a program has ended
    named = [(each["file"], each["line"]) for line in lines for each in line["findings"]]
    found = [place for place in named if place[0] != own_reads]
    made = score(found, waits)
    for key in ("missed", "false_alarms"):
        made[key] = [f"{file}:{number} {inside.get((file, number), '')}" for file, number in made[key]]
    bad = {line["name"]: f"{line['verdict']}: {line['why']}" for line in lines if line["verdict"] not in GOOD}
    return {"torch": torch.__version__, "programs": len(lines), **made, "ended_otherwise": bad}


GOOD = ("same", "unproven")
"""Verdicts of the sweep on programs that ran to the same end; a program that only makes tensors may be ``unproven``."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--card", action="store_true")
    given = parser.parse_args()
    wanted = chosen(given.only)
    lines = syncs_sweep.sweep(wanted, how=syncs_sweep.CARD if given.card else syncs_sweep.SIMULATED)
    made = report(lines, wanted)
    print(json.dumps(made, indent=1))
    if given.json:
        given.json.write_text(json.dumps(made, indent=1) + "\n")
    return int(bool(made["missed"] or made["false_alarms"] or made["ended_otherwise"]))


if __name__ == "__main__":
    sys.exit(main())
