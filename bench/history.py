"""Keep the anchors' history in one file, and only the reports that the performance page still shows.

    python -m bench.history [--reports bench/reports] [--prune]

Each measured figure of each report becomes a line of ``history.csv``, once. With ``--prune``, reports whose every figure was
measured again later are removed; the page stays what it was.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from bench.page import cards, load_reports, merge
from headway.cli.bench.anchors.command import KIND

COLUMNS = ("date", "commit", "card", "figure", "unit", "value", "runs", "command")


def lines_of(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One line for each figure that the report measured, in the order of ``COLUMNS``."""
    head = (report["date"], report["commit"], report["card"])
    return [
        (*head, row["name"], row["unit"] or "", f"{row['ours']:.6g}", str(len(row["runs"])), report["command"])
        for row in report["rows"]
        if row["ours"] is not None
    ]


def read(path: Path) -> list[tuple[str, ...]]:
    """The lines of ``path`` without its head; none where there is no file.

    Raises:
        SystemExit: the file has other columns.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    if tuple(head) != COLUMNS:
        raise SystemExit(f"{path} has the columns {head}, not {list(COLUMNS)}: move it away and run this again")
    return [tuple(line) for line in lines]


def append(path: Path, reports: list[dict[str, Any]]) -> int:
    """Add the figures of ``reports`` that ``path`` lacks; returns how many."""
    known = read(path)
    seen = set(known)
    new = [line for report in reports for line in lines_of(report) if line not in seen]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted([*known, *dict.fromkeys(new)]))
    return len(new)


def superseded(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports without which the page is the same, oldest first."""

    def shown(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [merge(of, card) for card in cards(of)]

    kept, gone, page = list(reports), [], shown(reports)
    for report in reports:
        others = [each for each in kept if each is not report]
        if others and shown(others) == page:
            kept = others
            gone.append(report)
    return gone


def prune(folder: Path) -> list[str]:
    """Remove the superseded reports of ``folder``, JSON and Markdown; returns the names of the files."""
    gone = {(report["date"], report["command"]) for report in superseded(load_reports(folder))}
    removed = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("kind") == KIND and (report["date"], report["command"]) in gone:
            for file in (path, path.with_suffix(".md")):
                file.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=Path("bench/reports"))
    parser.add_argument("--prune", action="store_true", help="remove the reports that the page no longer shows")
    options = parser.parse_args()
    history = options.reports / "history.csv"
    print(f"{append(history, load_reports(options.reports))} new figures in {history}")
    if options.prune:
        print(f"{len(prune(options.reports))} reports removed")


if __name__ == "__main__":
    main()
