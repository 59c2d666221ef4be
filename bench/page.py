"""The reports under bench/reports as one table, and its place in docs/performance.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.cli.bench.anchors.ablations import VARIANTS
from headway.cli.bench.anchors.command import KIND
from headway.cli.bench.anchors.table import MEASURED, table_lines

BEGIN, END = "<!-- anchors:begin (python -m bench.plots writes what is between) -->", "<!-- anchors:end -->"
TITLES = {"qwen3_06b": "Qwen3-0.6B", "llama_8b": "Llama-3.1-8B shapes", "bert_base": "BERT-base embeddings"}


def load_reports(folder: Path) -> list[dict[str, Any]]:
    """Reports of `headway bench anchors`, oldest first; full sizes only."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    reports = [report for report in found if report.get("kind") == KIND and "--tiny" not in report["command"].split()]
    return sorted(reports, key=lambda report: report["date"])


def merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of the newest report's card: of each row the newest measurement, with the commit it is of.

    A later run of a few rows then replaces these and leaves the others, and a row that was never measured keeps its reason.
    What a later run of all of a model's rows no longer has is gone.
    """
    if not reports:
        raise SystemExit("there is no report; headway bench anchors writes one into bench/reports")
    card, timeline = reports[-1]["card"], None
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
    wholes_last = sorted(reports, key=is_whole)
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
    """What stands between the marks: tables of each model, then the plots."""
    sources = sorted({(row["date"], row["commit"]) for row in merged["rows"]})
    from_where = ", ".join(f"{date} (commit {commit})" for date, commit in sources)
    lines = [f"{merged['card']}; measured {from_where}."]
    for model in dict.fromkeys(row["model"] for row in merged["rows"]):
        rows = [row for row in merged["rows"] if row["model"] == model and ".ablation_" not in row["name"]]
        if rows:
            lines += ["", f"### {TITLES.get(model, model)}", "", *table_lines(rows)]
    ablations = [row for row in merged["rows"] if ".ablation_" in row["name"]]
    if ablations:
        lines += ["", "### What each technique buys", "", *ablation_lines(ablations)]
    for image in images:
        lines += ["", f"![{image.removesuffix('.png').replace('-', ' ')}](img/{image})"]
    return "\n".join(lines)


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
