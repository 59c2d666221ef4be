"""Plots of the newest reports, and the table of docs/performance.md.

    python -m bench.plots [--reports bench/reports] [--images docs/img] [--page docs/performance.md]

Deterministic: the same reports give the same bytes with the same matplotlib. A plot without figures is not drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from bench.page import TITLES, load_reports, merge, sections, update

Rows = dict[str, dict[str, Any]]
BATCHES = (1, 8, 64, 256)
RATES = ("40", "100", "inf")
COLOURS = {"ours": "#1b6ca8", "anchor": "#c0504d", "floor": "#7f7f7f", "goal": "#4f9d4f"}
LABELS = {"ours": "Headway", "anchor": "vLLM 0.26", "floor": "floor (bytes / bandwidth)", "goal": "goal"}
LANES = {"host": ("CUDA calls of the host", "#8c6bb1"), "copy": ("copies", "#c0504d"), "kernel": ("kernels", "#1b6ca8")}


def series(rows: Rows, names: Sequence[str], key: str) -> list[tuple[int, float]]:
    """Position and value of those of ``names`` that have ``key``."""
    found = ((i, rows.get(name, {}).get(key)) for i, name in enumerate(names))
    return [(i, value) for i, value in found if value is not None]


def draw_lines(axes: Axes, rows: Rows, names: Sequence[str], labels: Sequence[str]) -> bool:
    """Ours, the anchor, the floor and the goal over the same positions; whether ours has anything."""
    for key, label in LABELS.items():
        points = series(rows, names, key)
        if points:
            xs, ys = [i for i, _ in points], [value for _, value in points]
            line = "-" if key in ("ours", "anchor") else "--"
            axes.plot(xs, ys, label=label, marker="o", color=COLOURS[key], linestyle=line)
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(True, alpha=0.3)
    return bool(series(rows, names, "ours"))


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}") if high < 100 * low else NullFormatter())


def itl(rows: Rows, _timeline: Any) -> Figure | None:
    """Time per decode step against rows, a panel per model."""
    models = [m for m in TITLES if any(f"{m}.itl_ms_greedy_bs{b}" in rows for b in BATCHES)]
    figure, axes = plt.subplots(1, max(len(models), 1), figsize=(5.2 * max(len(models), 1), 4), squeeze=False)
    drawn = False
    for panel, model in zip(axes[0], models):
        names = [f"{model}.itl_ms_greedy_bs{batch}" for batch in BATCHES]
        drawn |= draw_lines(panel, rows, names, [str(batch) for batch in BATCHES])
        panel.set(title=TITLES[model], xlabel="rows in the batch", ylabel="ms per decode step")
        logarithmic(panel)
        panel.legend()
    return figure if drawn else None


def busy(rows: Rows, _timeline: Any) -> Figure | None:
    """GPU busy, and kernel time over the bytes' floor."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4))
    labels = [str(batch) for batch in BATCHES]
    drawn = draw_lines(left, rows, [f"qwen3_06b.busy_pct_bs{b}" for b in BATCHES], labels)
    drawn |= draw_lines(right, rows, [f"qwen3_06b.kernel_over_floor_bs{b}" for b in BATCHES], labels)
    left.set(title="GPU busy while decoding", xlabel="rows in the batch", ylabel="%")
    right.set(title="Kernel time over floor", xlabel="rows in the batch", ylabel="times")
    if drawn:
        left.legend()
    return figure if drawn else None


def server(rows: Rows, _timeline: Any) -> Figure | None:
    """Latency of the server against the request rate."""
    figure, panels = plt.subplots(1, 2, figsize=(10.4, 4))
    drawn = False
    for panel, figure_of, title in zip(panels, ("ttft", "itl"), ("Time to first token", "Inter-token latency")):
        for percentile, line in (("p50", "-"), ("p99", ":")):
            names = [f"qwen3_06b.server_{rate}_{figure_of}_{percentile}_ms" for rate in RATES]
            for key in ("ours", "anchor"):
                points = series(rows, names, key)
                drawn |= key == "ours" and bool(points)
                label = f"{LABELS[key]}, {percentile}"
                xs, ys = [i for i, _ in points], [value for _, value in points]
                panel.plot(xs, ys, marker="o", color=COLOURS[key], linestyle=line, label=label)
        panel.set_xticks(range(len(RATES)), [*RATES[:-1], "all at once"])
        panel.set(title=title, xlabel="requests per second", ylabel="ms")
        logarithmic(panel)
        panel.grid(True, alpha=0.3)
        panel.legend()
    return figure if drawn else None


def timeline(_rows: Rows, events: Any) -> Figure | None:
    """A few decode steps, profiled."""
    if not events:
        return None
    figure, axes = plt.subplots(figsize=(10.4, 2.6))
    for place, (lane, (_, colour)) in enumerate(LANES.items()):
        spans = [(start, us) for kind, _, start, us in events["events"] if kind == lane]
        axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(LANES)), [words for words, _ in LANES.values()])
    model = TITLES.get(events["model"], events["model"])
    title = f"{model}: decode steps of {events['rows']} rows under the profiler, which slows the host"
    axes.set(xlabel="microseconds", title=title)
    return figure


def ablation(rows: Rows, _timeline: Any) -> Figure | None:
    """Time per step of each variant."""
    variants = list(
        dict.fromkeys(
            name.split(".ablation_")[1].split("_itl_")[0] for name in rows if "_itl_ms" in name and ".ablation_" in name
        )
    )
    figure, axes = plt.subplots(figsize=(8, 4))
    drawn, width = False, 0.8 / max(len(variants), 1)
    for i, variant in enumerate(variants):
        points = series(rows, [f"qwen3_06b.ablation_{variant}_itl_ms_bs{b}" for b in BATCHES], "ours")
        drawn |= bool(points)
        axes.bar(
            [x + (i - len(variants) / 2) * width for x, _ in points],
            [y for _, y in points],
            width,
            label=variant if points else None,
        )
    axes.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    axes.set(title="What each technique buys, Qwen3-0.6B", xlabel="rows in the batch", ylabel="ms per decode step")
    logarithmic(axes)  # eager steps are ten times as long
    if drawn:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)
    return figure if drawn else None


PLOTS: dict[str, Callable[[Rows, Any], Figure | None]] = {
    "itl-against-rows.png": itl,
    "gpu-busy.png": busy,
    "server-latency.png": server,
    "decode-timeline.png": timeline,
    "ablations.png": ablation,
}


def draw(merged: dict[str, Any], folder: Path) -> list[str]:
    """Write every plot that has figures; gives their names. One that has lost its figures is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {row["name"]: row for row in merged["rows"]}
    drawn = []
    for name, plot in PLOTS.items():
        figure = plot(rows, merged["timeline"])
        if figure is None:
            (folder / name).unlink(missing_ok=True)
        else:
            figure.tight_layout()
            figure.savefig(folder / name, dpi=110, metadata={"Software": None})
            drawn.append(name)
        plt.close("all")
    return drawn


def main() -> None:
    """Draw, and write the page's section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reports", type=Path, default=Path("bench/reports"))
    parser.add_argument("--images", type=Path, default=Path("docs/img"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    options = parser.parse_args()
    reports = load_reports(options.reports)
    merged = merge(reports)
    drawn = draw(merged, options.images)
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(update(page, sections(reports, drawn)), encoding="utf-8")
    print(f"{options.page}: {len(merged['rows'])} rows, {', '.join(drawn)}")


if __name__ == "__main__":
    main()
