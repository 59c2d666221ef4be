"""Plots and the table of docs/performance.md, from made-up reports; and that the page shows the newest real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import page, plots
from headway.cli.bench.anchors.command import KIND
from tests.engine.fake_core import ROOT

NAMES = [
    *(f"itl_ms_greedy_bs{b}" for b in plots.BATCHES),
    *(f"busy_pct_bs{b}" for b in plots.BATCHES),
    *(f"kernel_over_floor_bs{b}" for b in plots.BATCHES),
    *(f"server_{rate}_{what}_{p}_ms" for rate in plots.RATES for what in ("ttft", "itl") for p in ("p50", "p99")),
    *(f"ablation_{v}_itl_ms_bs{b}" for v in ("default", "depth0") for b in plots.BATCHES),
    "ablation_default_ttft_ms",
    "ablation_depth0_ttft_ms",
]


def row(name: str, ours: float | None, status: str = "measured", note: str = "") -> dict[str, Any]:
    return {
        "name": f"qwen3_06b.{name}", "model": "qwen3_06b", "unit": "ms", "floor": 0.5, "anchor": 4.0, "goal": 1.0,
        "better": "lower", "runs": [], "status": status, "note": note, "ours": ours, "met": None,
    }  # fmt: skip


def write(folder: Path, name: str, rows: list[dict[str, Any]], **other: Any) -> None:
    events = [["host", "cudaGraphLaunch", 0.0, 5.0], ["copy", "Memcpy", 5.0, 1.0], ["kernel", "gemm", 6.0, 20.0]]
    report = {
        "kind": KIND, "card": "NVIDIA H200", "commit": "abc", "date": f"{name}T00:00:00+00:00",
        "command": "headway bench anchors --only some", "rows": rows, "timeline": {"rows": 8, "events": events}, **other,
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(report))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "2026-01-01", [row(name, 1.0 + i / 7) for i, name in enumerate(NAMES)])
    return tmp_path


def test_all_plots_and_twice_the_same(folder: Path, tmp_path: Path) -> None:
    merged = page.merge(page.load_reports(folder))
    first, second = tmp_path / "a", tmp_path / "b"
    assert plots.draw(merged, first) == plots.draw(merged, second) == list(plots.PLOTS)
    for name in plots.PLOTS:
        data = (first / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
        assert data == (second / name).read_bytes()
    merged["rows"][0]["ours"] = 9.0
    plots.draw(merged, second)
    assert (first / "itl-against-rows.png").read_bytes() != (second / "itl-against-rows.png").read_bytes()


def test_a_plot_without_figures_is_not_drawn(folder: Path, tmp_path: Path) -> None:
    images = tmp_path / "img"
    plots.draw(page.merge(page.load_reports(folder)), images)
    few = {
        "card": "x",
        "rows": [row("itl_ms_greedy_bs1", 1.0), row("busy_pct_bs1", None, "not served")],
        "timeline": None,
    }
    assert plots.draw(few, images) == ["itl-against-rows.png"]
    assert [path.name for path in images.iterdir()] == ["itl-against-rows.png"]


def test_newer_rows_replace_older_ones(folder: Path) -> None:
    failed = row("busy_pct_bs1", None, "failed", "oh")
    write(folder, "2026-02-01", [row("itl_ms_greedy_bs8", 0.25), failed, row("new", 5.0)], commit="def", timeline=None)
    write(folder, "2026-03-01", [row("itl_ms_greedy_bs8", 99.0)], card="other")
    write(folder, "2026-01-15", [row("itl_ms_greedy_bs8", 77.0)], command="headway bench anchors --tiny")
    write(folder, "2026-04-01", [row("unrelated", 1.0)], kind="something else")
    merged = page.merge(page.load_reports(folder))
    assert merged["card"] == "NVIDIA H200", "of the other card one figure is known"
    rows = {r["name"].partition(".")[2]: r for r in merged["rows"]}
    assert (rows["itl_ms_greedy_bs8"]["ours"], rows["itl_ms_greedy_bs8"]["commit"]) == (0.25, "def")
    assert rows["busy_pct_bs1"]["ours"] is not None  # an older figure is better than a failure
    assert rows["itl_ms_greedy_bs1"]["commit"] == "abc"
    assert merged["timeline"] is not None
    assert [r["name"] for r in merged["rows"]][:3] == [
        f"qwen3_06b.{n}" for n in ("itl_ms_greedy_bs8", "busy_pct_bs1", "new")
    ]


def test_what_a_later_run_of_all_rows_no_longer_has_is_gone(folder: Path) -> None:
    write(folder, "2026-01-02", [row("itl_ms_greedy_bs1", 2.0)], command="headway bench anchors --only 'itl_*'")
    names = {r["name"] for r in page.merge(page.load_reports(folder))["rows"]}
    assert names == {f"qwen3_06b.{name}" for name in NAMES}  # a run of some rows takes nothing away
    write(folder, "2026-01-03", [row("ttft_ms_alone", 2.0)], command="headway bench anchors --model qwen3_06b")
    names = {r["name"].removeprefix("qwen3_06b.") for r in page.merge(page.load_reports(folder))["rows"]}
    assert names == {"ttft_ms_alone", *(name for name in NAMES if name.startswith("ablation_"))}


def test_rows_stand_as_in_the_newest_run_of_all(folder: Path) -> None:
    whole = [row("itl_ms_greedy_bs1", 1.0), row("ttft_ms_alone", 2.0), row("nano_tok_s", 3.0)]
    write(folder, "2026-01-02", whole, command="headway bench anchors --model qwen3_06b")
    write(folder, "2026-01-03", [row("new", 5.0), row("nano_tok_s", 4.0)])
    names = [r["name"].removeprefix("qwen3_06b.") for r in page.merge(page.load_reports(folder))["rows"]]
    assert names[:4] == ["itl_ms_greedy_bs1", "ttft_ms_alone", "nano_tok_s", "new"]


def test_another_card_has_a_section_of_its_own(folder: Path) -> None:
    """The main card is that of which most figures are known, whatever was measured last."""
    write(folder, "2026-01-02", [row("nano_tok_s", 3.0)], command="headway bench anchors --model qwen3_06b")
    command = "headway bench anchors --model bert_base"
    write(folder, "2026-01-03", [row("nano_tok_s", 4.0)], card="NVIDIA H100", command=command)
    reports = page.load_reports(folder)
    assert page.cards(reports) == ["NVIDIA H200", "NVIDIA H100"]
    found = [{r["name"]: r["ours"] for r in page.merge(reports, card)["rows"]} for card in page.cards(reports)]
    assert [each["qwen3_06b.nano_tok_s"] for each in found] == [3.0, 4.0]
    text = page.sections(reports, ["gpu-busy.png"])
    assert text.index("NVIDIA H200;") < text.index("gpu-busy") < text.index("NVIDIA H100;")


def test_the_section(folder: Path) -> None:
    write(folder, "2026-02-01", [row("ablation_eager_prefill_ttft_ms", None, "not served", "no switch")])
    text = page.section(page.merge(page.load_reports(folder)), ["gpu-busy.png"])
    assert "| itl_ms_greedy | ms | 1 (4) / 1 |" in text
    assert "ablation_" not in text
    assert "| Qwen3-0.6B | eager_prefill | not served: no switch |" in text
    assert any(line.startswith("| Qwen3-0.6B | depth0 | ") and line.count("|") == 8 for line in text.splitlines())
    assert text.endswith("![gpu busy](img/gpu-busy.png)")
    done = page.update(f"a\n{page.BEGIN}\nold\n{page.END}\nb", text)
    assert done == f"a\n{page.BEGIN}\n{text}\n{page.END}\nb"
    assert page.update(done, text) == done
    with pytest.raises(SystemExit, match="no <!-- anchors:begin"):
        page.update("nothing", text)


def test_the_page_shows_the_newest_reports() -> None:
    """``python -m bench.plots`` after a new report."""
    docs = Path(ROOT) / "docs"
    reports = page.load_reports(Path(ROOT) / "bench/reports")
    written = (docs / "performance.md").read_text(encoding="utf-8")
    images = [name for name in plots.PLOTS if (docs / "img" / name).exists()]
    assert page.update(written, page.sections(reports, images)) == written
