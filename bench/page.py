"""The reports under bench/reports as one table, and its place in docs/performance.md."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from headway.cli.bench.anchors.ablations import VARIANTS
from headway.cli.bench.anchors.command import KIND
from headway.cli.bench.anchors.table import MEASURED, number, table_lines

BEGIN, END = "<!-- anchors:begin (python -m bench.plots writes what is between) -->", "<!-- anchors:end -->"
MISSED = "▲ "
TITLES = {
    "qwen3_06b": "Qwen3-0.6B",
    "llama_8b": "Llama-3.1-8B shapes",
    "llama32_1b": "Llama-3.2-1B",
    "qwen25_15b": "Qwen2.5-1.5B",
    "qwen3_4b": "Qwen3-4B",
    "gemma3_1b": "Gemma3-1B",
    "bert_base": "BERT-base embeddings",
    "qwen3_embedding_06b": "Qwen3-Embedding-0.6B",
    "mamba2_780m": "Mamba2-780M",
    "gdn_08b": "Gated delta net hybrid (near Qwen3.5-0.8B)",
    "gdn_08b_ring": "The same with states written back once in 8 tokens",
    "gdn_08b_ngram": "The same with n-gram drafts (3, synthetic acceptance length 2.5; ms a token)",
    "mamba2_780m_ring": "Mamba2-780M with states written back once in 8 tokens",
    "mamba2_780m_ngram": "Mamba2-780M with n-gram drafts (3, synthetic acceptance length 2.5; ms a token)",
    "qwen3_06b_ngram": "Qwen3-0.6B with n-gram drafts (3, synthetic acceptance length 2.5; ms a token)",
    "qwen3_06b_rejected": "Qwen3-0.6B with n-gram drafts of which none is accepted (3, adaptive; at most 1.15 times plain)",
    "qwen3_06b_eagle3": "Qwen3-0.6B with EAGLE-3 (3 drafts, synthetic acceptance length 2.5; ms a token)",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
}


def load_reports(folder: Path) -> list[dict[str, Any]]:
    """Reports of `headway bench anchors`, oldest first; full sizes only."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    reports = [report for report in found if report.get("kind") == KIND and "--tiny" not in report["command"].split()]
    return sorted(reports, key=lambda report: report["date"])


def cards(reports: list[dict[str, Any]]) -> list[str]:
    """The cards that were measured: first that of which most figures are known, then the others, newest first."""
    known: dict[str, set[str]] = {}
    for report in reversed(reports):
        measured = (row["name"] for row in report["rows"] if row["status"] == MEASURED)
        known.setdefault(report["card"], set()).update(measured)
    newest = list(known)
    first = max(newest, key=lambda card: len(known[card]), default="")
    return [first, *(card for card in newest if card != first)] if newest else []


def merge(reports: list[dict[str, Any]], card: str | None = None) -> dict[str, Any]:
    """One report of a card, if not said of the first of ``cards``: of each row the newest measurement, with its commit.

    A later run of a few rows then replaces these and leaves the others, and a row that was never measured keeps its reason.
    What a later run of all of a model's rows no longer has is gone.
    """
    if not reports:
        raise SystemExit("there is no report; headway bench anchors writes one into bench/reports")
    card, timeline = card or cards(reports)[0], None
    rows: dict[str, dict[str, Any]] = {}
    for report in (report for report in reports if report["card"] == card):
        if report["timeline"]:
            timeline = {**report["timeline"], "model": report["rows"][0]["model"]}
        if is_whole(report):
            rows = still_offered(rows, report["rows"])
        for row in report["rows"]:
            known = rows.get(row["name"])
            if known is None or row["status"] == MEASURED or known["status"] != MEASURED:
                rows[row["name"]] = {**row, "commit": report["commit"], "date": report["date"][:10]}
    wholes_last = sorted((report for report in reports if report["card"] == card), key=is_whole)
    seen = dict.fromkeys(row["name"] for report in reversed(wholes_last) for row in report["rows"])
    place = {name: i for i, name in enumerate(seen)}  # the order of the newest whole run; what it leaves out follows
    models = {model: i for i, model in enumerate(TITLES)}
    ordered = sorted(rows.values(), key=lambda row: (models.get(row["model"], len(models)), place[row["name"]]))
    return {"card": card, "rows": ordered, "timeline": timeline}


def is_whole(report: dict[str, Any]) -> bool:
    """Whether the run was of all rows its models have."""
    return not {"--only", "--ablations"} & set(report["command"].split())


def still_offered(rows: dict[str, dict[str, Any]], whole: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """``rows`` less those of a model in ``whole``, a run of all its rows, that it lacks; ablations have runs of their own."""
    names, models = {row["name"] for row in whole}, {row["model"] for row in whole}
    gone = {name for name, row in rows.items() if row["model"] in models and ".ablation_" not in name} - names
    return {name: row for name, row in rows.items() if name not in gone}


def section(merged: dict[str, Any], images: list[str]) -> str:
    """Of one card: tables of each model, then the plots."""
    sources: dict[str, set[str]] = {}
    for row in merged["rows"]:
        sources.setdefault(row["date"], set()).add(row["commit"])
    when = "; ".join(f"{date} at {', '.join(sorted(commits))}" for date, commits in sorted(sources.items()))
    lines = textwrap.wrap(f"{merged['card']}; measured {when}.", 132, break_long_words=False, break_on_hyphens=False)
    for model in dict.fromkeys(row["model"] for row in merged["rows"]):
        rows = [row for row in merged["rows"] if row["model"] == model and ".ablation_" not in row["name"]]
        if rows:
            lines += ["", f"### {TITLES.get(model, model)}", "", *model_lines(rows)]
    ablations = [row for row in merged["rows"] if ".ablation_" in row["name"]]
    if ablations:
        lines += ["", "### What each technique buys", "", *ablation_lines(ablations)]
    for image in images:
        lines += ["", f"![{image.removesuffix('.png').replace('-', ' ')}](img/{image})"]
    return "\n".join(lines)


def sections(reports: list[dict[str, Any]], images: list[str]) -> str:
    """What stands between the marks: the main card with the plots, then the others."""
    first, *others = cards(reports)
    return "\n\n".join(
        [section(merge(reports, first), images), *(section(merge(reports, card), []) for card in others)]
    )


PIVOTS = (
    (re.compile(r"[^.]*\.(?P<head>.*)_bs(?P<column>\d+)(?P<tail>.*)"), "{} rows"),
    (re.compile(r"[^.]*\.(?P<head>server)_(?P<column>40|100|inf)(?P<tail>_.*)"), "{} requests/s"),
)
"""Figures that differ in one number share a line of a table, with a column for each number."""


def model_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A model's tables: figures measured at several batch sizes or request rates side by side, then all others."""
    judged = any(row["anchor"] is not None or row["goal"] is not None for row in rows)
    lines = [f"Ours, vLLM 0.26 in brackets, the goal behind a slash; {MISSED}marks a goal missed."]
    if not judged:
        lines = ["Ours; in brackets how many times the floor by the card's own bandwidth."]
    for pattern, title in PIVOTS:
        table, rows = pivot(rows, pattern, title)
        lines += ["", *table] if table else []
    return [*lines, "", *table_lines(rows)] if rows else lines


def pivot(rows: list[dict[str, Any]], pattern: re.Pattern[str], title: str) -> tuple[list[str], list[dict[str, Any]]]:
    """A table of the rows whose names match ``pattern`` and differ in its group ``column`` alone, and the rows left over."""
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found = pattern.fullmatch(row["name"])
        if found:
            families.setdefault(found["head"] + found["tail"], {})[found["column"]] = row
    families = {name: by_column for name, by_column in families.items() if len(by_column) > 1}
    if not families:
        return [], rows
    columns = sorted({column for family in families.values() for column in family}, key=float)
    lines = ["| figure | unit | " + " | ".join(map(title.format, columns)) + " |", "|---|---|" + "---|" * len(columns)]
    for name, family in families.items():
        unit = next(iter(family.values()))["unit"]
        lines.append("| " + " | ".join([name, unit, *(cell(family.get(column)) for column in columns)]) + " |")
    shown = {id(row) for family in families.values() for row in family.values()}
    return lines, [row for row in rows if id(row) not in shown]


def cell(row: dict[str, Any] | None) -> str:
    """``0.52 (1.6) / 0.6``: a measured figure beside the anchor and the goal."""
    if row is None:
        return ""
    if row["ours"] is None:
        return f"{row['status']}: {row['note']}"
    mark = MISSED if row["met"] is False else ""
    anchor = f" ({number(row['anchor'])})" if row["anchor"] is not None else ""
    if row["anchor"] is None and row["goal"] is None and row["floor"] and row["better"] == "lower":
        anchor = f" ({row['ours'] / row['floor']:.2f})"
    goal = f" / {number(row['goal'])}" if row["goal"] is not None else ""
    return f"{mark}{number(row['ours'])}{anchor}{goal}"


def ablation_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One line a variant, of those there are today; one column a figure."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    columns: list[str] = []
    for row in rows:
        name = row["name"].partition(".ablation_")[2]
        variant, figure = name.split("_itl_", 1) if "_itl_" in name else (name.removesuffix("_ttft_ms"), "ttft_ms")
        if variant not in VARIANTS:
            continue
        figure = f"itl_{figure}" if figure != "ttft_ms" else figure
        columns += [figure] if figure not in columns else []
        cells.setdefault((row["model"], variant), {})[figure] = row
    lines = ["| model | variant | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for (model, variant), found in cells.items():
        first = next(iter(found.values()))
        if all(row["ours"] is None for row in found.values()):
            shown = [f"{first['status']}: {first['note']}", *[""] * (len(columns) - 1)]
        else:
            values = [found.get(column, {}).get("ours") for column in columns]
            shown = ["" if value is None else f"{value:.4g}" for value in values]
        lines.append(f"| {TITLES.get(model, model)} | {variant} | " + " | ".join(shown) + " |")
    return lines


def update(page: str, text: str) -> str:
    """``page`` with ``text`` between the marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page has no {BEGIN} ... {END}")
    return f"{head}{begin}\n{text}\n{end}{tail}"
