"""Sections of docs/syncs-accuracy.md on whole programs: lines marked before they ran, the sweep, five that people run."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

NAMES = {
    "lines": "syncs-lines.json",
    "lines_first": "syncs-lines-first.json",
    "lines_card": "syncs-lines-card.json",
    "sweep": "syncs-sweep.json",
    "programs": "syncs-programs.json",
    "programs_card": "syncs-programs-card.json",
}
"""Reports, in bench/reports/proof."""
Report = dict[str, Any]


def paragraph(*parts: str) -> list[str]:
    """Parts joined by spaces, broken into lines; an empty one follows."""
    return [*textwrap.wrap(" ".join(parts), 128, break_long_words=False, break_on_hyphens=False), ""]


def sections(folder: Path) -> list[str]:
    """All of them whose reports are in ``folder``."""
    found = {
        name: json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        for name, file in NAMES.items()
    }
    lines = lines_section(found["lines_first"], found["lines"], found["lines_card"]) if found["lines_first"] else []
    lines += sweep_section(found["sweep"]) if found["sweep"] else []
    return lines + (programs_section(found["programs"], found["programs_card"]) if found["programs"] else [])


def lines_section(first: Report, now: Report, card: Report) -> list[str]:
    """Programs whose lines were marked: first runs by series, what they say now, what a card says of the marks."""
    lines = ["## Whole programs, line by line", ""]
    lines += paragraph(
        "`bench/programs/syncs_published`: programs of which no rule, no corpus and no sweep knew when they were written.",
        "A line that waits is marked; the marks come from documentation and sources, and were committed before anything ran.",
        "Precision and recall count lines. **First runs of the simulation**, each program in a process of its own:",
    )
    lines += [
        "| programs | number | marked lines | precision | recall | died | other values | torch |",
        "|---" * 8 + "|",
    ]
    for row in first["series"]:
        cells = [
            row[name] for name in ("what", "programs", "lines", "precision", "recall", "died", "differed", "torch")
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append("")
    for row in first["series"]:
        if row.get("afterwards"):
            lines += paragraph(f"*{row['what']}*: {row['afterwards']}")
    lines += paragraph(*first["cures"])
    if now:
        lines += paragraph(
            f"Since what they showed was mended by classes, they are a regression test: {now['programs']} programs,",
            f"{now['lines']} marked lines, precision {now['precision']}, recall {now['recall']} (torch {now['torch']}).",
        )
    if not card:
        return [*lines, *paragraph("No card has judged the marks.")]
    lines += paragraph(
        f"**On an {card['card']}** (torch {card['torch']}; {card['programs']} programs), against the marks:"
    )
    lines += ["| detector | precision | recall | marked, no wait | waits, not marked |", "|---|---|---|---|---|"]
    for what, line in (("live guard and CUPTI", card), *card.get("alone", {}).items()):
        told = (", ".join(line[key]) or "none" for key in ("missed", "false_alarms"))
        lines.append(f"| {what} | {line['precision']} | {line['recall']} | {' | '.join(told)} |")
    return [*lines, "", *(paragraph(card["note"]) if "note" in card else [])]


def sweep_section(sweep: Report) -> list[str]:
    """Programs of many kinds, which have to end as on the CPU."""
    lines = ["## The sweep", ""]
    lines += paragraph(
        "`bench/programs/syncs_sweep`: each program runs on the CPU and under the simulation with the same seed, and has to",
        "end the same way (`python -m bench.syncs_sweep`). *Otherwise* counts ends that nobody expected.",
    )
    lines += [
        "| run | files | programs | no CPU run | alike | same exception | expected | otherwise | torch |",
        "|---" * 9 + "|",
    ]
    for run in sweep["runs"]:
        keys = ("when", "files", "programs", "no_cpu", "same", "same_error", "expected", "otherwise", "torch")
        lines.append(f"| {' | '.join(str(run[key]) for key in keys)} |")
    lines.append("")
    return [
        *lines,
        *(line for run in sweep["runs"] if run.get("note") for line in paragraph(f"*{run['when']}*: {run['note']}")),
    ]


def programs_section(programs: Report, card: Report) -> list[str]:
    """Programs that people run: time beside eager, lines, and a card's word on them."""
    lines = ["## Five programs that people run", ""]
    lines += paragraph(
        "`python -m bench.syncs_programs`. Seconds of one processor, the last of several passes in one process; the simulation",
        "beside torch's own CPU run. Results are equal where it says so (SmolLM2: every token, greedy and drawn).",
    )
    lines += [
        "| program | CPU, eager | simulated | times | lines that wait | same results |",
        "|---|---|---|---|---|---|",
    ]
    for name, line in programs.items():
        if "error" in line:
            lines.append(f"| {name} | not run: a package is missing | | | | |")
            continue
        eager, simulated = line["cpu_processor"], line["simulated_processor"]
        waits = len({finding["line"] for finding in line["findings"]})
        same = "yes" if line["same"] else "no"
        lines.append(f"| {name} | {eager:.2f} | {simulated:.2f} | {simulated / eager:.1f} | {waits} | {same} |")
    lines.append("")
    if not card:
        return lines
    note, card = card.get("note", ""), {name: line for name, line in card.items() if name != "note"}
    lines += [
        "| on a card | plain, s | guarded | with CUPTI | lines that wait | guard missed | simulation missed, said more |"
    ]
    lines.append("|---" * 7 + "|")
    for name, line in card.items():
        if "error" in line:
            lines.append(f"| {name} | did not run | | | | | |")
            continue
        seconds = " | ".join(f"{line[f'{way}_seconds']:.3f}" for way in ("plain", "guarded", "cupti"))
        waits = len({finding["line"] for finding in line["findings"]})
        missed, more = (len(line.get(f"simulation_{key}", [])) for key in ("missed", "said_more"))
        lines.append(f"| {name} | {seconds} | {waits} | {len(line['guard_missed'])} | {missed}, {more} |")
    return [*lines, "", *(paragraph(note) if note else [])]
