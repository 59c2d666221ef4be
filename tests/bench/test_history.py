from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import history
from bench.page import load_reports, merge
from headway.cli.bench.anchors.command import KIND


def report(date: str, command: str = "headway bench anchors --only x", **figures: float | None) -> dict[str, Any]:
    rows = [
        {
            "name": f"qwen3_06b.{name}",
            "model": "qwen3_06b",
            "unit": "ms",
            "ours": ours,
            "runs": [ours],
            "status": "measured",
        }
        for name, ours in figures.items()
    ]
    head = {"kind": KIND, "card": "a card", "commit": "c", "date": date, "command": command, "timeline": None}
    return {**head, "rows": rows}


def write(folder: Path, *reports: dict[str, Any]) -> None:
    for each in reports:
        (folder / f"{each['date']}.json").write_text(json.dumps(each), encoding="utf-8")
        (folder / f"{each['date']}.md").write_text("a page", encoding="utf-8")


def test_every_figure_is_kept_once(tmp_path: Path) -> None:
    path, first, second = tmp_path / "history.csv", report("2026-01-01", a=1.0, b=None), report("2026-01-02", a=2.0)
    assert history.append(path, [first]) == 1  # b was not measured
    assert history.append(path, [first, second]) == 1
    assert history.append(path, [second]) == 0
    assert [(line[0], line[3], line[5]) for line in history.read(path)] == [
        ("2026-01-01", "qwen3_06b.a", "1"),
        ("2026-01-02", "qwen3_06b.a", "2"),
    ]


def test_what_the_page_shows_stays(tmp_path: Path) -> None:
    write(tmp_path, report("2026-01-01", a=1.0), report("2026-01-02", a=2.0, b=3.0), report("2026-01-03", a=4.0))
    before = merge(load_reports(tmp_path))
    assert history.prune(tmp_path) == ["2026-01-01.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"2026-01-0{day}.{kind}" for day in (2, 3) for kind in ("json", "md")
    ]
    assert merge(load_reports(tmp_path)) == before


def test_the_only_report_stays(tmp_path: Path) -> None:
    write(tmp_path, report("2026-01-01", a=1.0))
    assert history.prune(tmp_path) == []


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("something,else\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="move it away"):
        history.append(path, [report("2026-01-01", a=1.0)])
    assert path.read_text(encoding="utf-8") == "something,else\n"
