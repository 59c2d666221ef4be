"""The table of figures: what is measured, what came out, and what is known of each row."""

from __future__ import annotations

import fnmatch
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from headway.core.errors import HeadwayError, InvalidRequestError

KNOWN: Final = Path(__file__).with_name("figures.json")
MEASURED: Final = "measured"
NOT_RUN: Final = "not run"
NOT_SERVED: Final = "not served"
REFUSED: Final = "refused"
FAILED: Final = "failed"


@dataclass(slots=True)
class Row:
    """One figure.

    Attributes:
        name: unique in the report: model.figure.
        better: "lower" or "higher".
        floor, anchor, goal: the card's limit, the other engine's figure, what we want; None where there is none.
        runs: one value a run; ``ours`` is their median.
        status: measured, not run, not served (the engine cannot), refused (a check was red) or failed.
        note: why.
    """

    name: str
    model: str
    unit: str
    better: str
    floor: float | None = None
    anchor: float | None = None
    goal: float | None = None
    runs: list[float] = field(default_factory=list)
    status: str = NOT_RUN
    note: str = ""

    @property
    def ours(self) -> float | None:
        return statistics.median(self.runs) if self.status == MEASURED else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or a figure."""
        if self.ours is None or self.goal is None:
            return None
        return self.ours <= self.goal if self.better == "lower" else self.ours >= self.goal

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        keys = ("name", "model", "unit", "floor", "anchor", "goal", "better", "runs", "status", "note")
        return {key: getattr(self, key) for key in keys} | {"ours": self.ours, "met": self.met}


class Table:
    """Rows in the order in which they were announced.

    Args:
        model: prefix of the names.
        only: patterns (as of a shell) of the figures wanted; empty: all.
        known: figure -> floor, anchor and goal.
    """

    def __init__(self, model: str, only: Sequence[str] = (), known: dict[str, dict[str, float]] | None = None) -> None:
        self.model = model
        self._only, self._known = list(only), known or {}
        self._rows: dict[str, Row] = {}

    def announce(self, names: Sequence[str], unit: str, better: str = "lower") -> None:
        """These figures exist. Saying it again changes nothing."""
        for name in names:
            if name in self._rows:
                continue
            known = {key: self._known.get(name, {}).get(key) for key in ("floor", "anchor", "goal")}
            self._rows[name] = Row(
                f"{self.model}.{name}", self.model, unit, better, known["floor"], known["anchor"], known["goal"]
            )

    def set_floors(self, found: dict[str, float]) -> None:
        """Floors of figures of which none is known; before these are announced."""
        for name, floor in found.items():
            self._known.setdefault(name, {}).setdefault("floor", floor)

    def wants(self, *names: str) -> bool:
        """Whether any of these figures is asked for and can still be had."""
        dead = {name for name, row in self._rows.items() if row.status not in (NOT_RUN, MEASURED)}
        return any(self._wants(name) and name not in dead for name in names)

    def _wants(self, name: str) -> bool:
        full = f"{self.model}.{name}"
        return not self._only or any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(full, p) for p in self._only)

    def add(self, name: str, value: float, note: str = "") -> None:
        """One run's value."""
        row = self._rows[name]
        if row.status not in (NOT_RUN, MEASURED):
            return  # an earlier run showed that there is no figure
        row.runs.append(float(value))
        row.status, row.note = MEASURED, note or row.note
        typer.echo(f"{row.name:<44} {value:>14,.3f} {row.unit}", err=True)

    def value(self, name: str) -> float | None:
        """The median so far; None if there is none."""
        row = self._rows.get(name)
        return None if row is None else row.ours

    def mark(self, names: Sequence[str], status: str, note: str) -> None:
        """Wanted figures among ``names`` will not be measured, loudly. What was measured of them is dropped."""
        wanted = [name for name in names if self._wants(name)]
        note = " ".join(note.split())
        for name in wanted:
            row = self._rows[name]
            row.status, row.note, row.runs = status, note, []
        if wanted:
            more = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
            typer.echo(f"{self.model}.{wanted[0]}{more} {status.upper()}: {note}", err=True)

    def refuse_all(self, note: str) -> None:
        """A check is red: no figure leaves this table."""
        for name, row in self._rows.items():
            if row.status == MEASURED and not self._wants(name):
                row.status = NOT_RUN
        self.mark([name for name, row in self._rows.items() if row.status in (MEASURED, NOT_RUN)], REFUSED, note)

    @contextmanager
    def measuring(self, names: Sequence[str]) -> Iterator[None]:
        """Whatever goes wrong inside is noted in these rows, and the other rows are measured nevertheless."""
        try:
            yield
        except InvalidRequestError as error:
            self.mark(names, NOT_SERVED, str(error))
        except HeadwayError as error:
            self.mark(names, FAILED, str(error))
        except Exception as error:
            self.mark(names, FAILED, f"{type(error).__name__}: {error}")

    def rows(self) -> list[Row]:
        """The wanted ones, and those that were measured on the way to them."""
        return [row for name, row in self._rows.items() if self._wants(name) or row.status == MEASURED]


def known_of(card: str) -> dict[str, Any]:
    """All that is known of figures; nothing on a card other than the one they were measured on. A GH200 is no H200."""
    found: dict[str, Any] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return found if found["card"] in card.split() else {}


def known_figures(model: str, card: str) -> dict[str, dict[str, float]]:
    """What is known of ``model``'s figures."""
    found: dict[str, dict[str, float]] = known_of(card).get("models", {}).get(model, {})
    return found


def known_bandwidth(card: str) -> float | None:
    """Bytes per second the card's memory can be read at; None if unknown."""
    return known_of(card).get("bytes_per_second")


def markdown(report: dict[str, Any]) -> str:
    """A report for people."""
    lines = [
        f"# Anchors on {report['card']}, {report['date']}",
        "",
        f"commit {report['commit']}, {', '.join(f'{name} {version}' for name, version in report['versions'].items())}",
        "",
        f"`{report['command']}`",
        "",
        f"{report['num_runs']} run(s), medians; a Python loop of 3 million additions takes the host "
        f"{report['python_loop_s']} s",
        *(["", report["compared"]] if "compared" in report else []),
    ]
    for model in dict.fromkeys(row["model"] for row in report["rows"]):
        lines += ["", f"## {model}", "", *table_lines([row for row in report["rows"] if row["model"] == model])]
    return "\n".join(lines) + "\n"


def table_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of reports as a Markdown table."""
    lines = ["| figure | unit | floor | ours | vLLM 0.26 | ratio | goal | met |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        ours, anchor, met = row["ours"], row["anchor"], {True: "yes", False: "no", None: ""}[row["met"]]
        ratio = f"{ours / anchor:.2f}" if ours is not None and anchor else ""
        shown = number(ours) if ours is not None else f"**{row['status']}**: {row['note']}"
        cells = [row["name"].partition(".")[2], row["unit"], number(row["floor"]), shown, number(anchor), ratio]
        lines.append("| " + " | ".join([*cells, number(row["goal"]), met]) + " |")
    return lines


def number(value: float | None) -> str:
    """Four digits, or whole thousands; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
