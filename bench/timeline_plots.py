"""Plots of what ``bench.timelines`` recorded.

    python -m bench.timeline_plots [--records bench/reports/timelines] [--images docs/img]

One plot a model and workload. Deterministic: the same records give the same bytes with the same matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.kernel_kinds import KINDS, kind_of
from bench.ops.limits import BYTES_PER_US, FLOPS_PER_US
from bench.page import TITLES

COLOURS = {"attention": "#1b6ca8", "products": "#4f9d4f", "sampler": "#c0504d", "rest": "#b8b8b8"}
HOST = {"schedule": "#c7b5e0", "launch": "#8c6bb1", "apply": "#4d2c75"}


def by_kind(spent: dict[str, float]) -> dict[str, float]:
    """Microseconds by kind of kernel."""
    found = dict.fromkeys(KINDS, 0.0)
    for kernel, us in spent.items():
        found[kind_of(kernel)] += us
    return found


def draw_layer(axes: Axes, layer: Sequence[Sequence[Any]], floors: dict[str, float]) -> None:
    """One bar a kernel, from one attention to the next, then what bytes or products alone would take."""
    rows = [*((name, start, us, COLOURS[kind_of(name)]) for name, start, us in layer)]
    at = 0.0
    for name, us in floors.items():
        rows.append((name, at, us, "#ffffff"))
        at += us
    for place, (_, start, us, colour) in enumerate(rows):
        axes.barh(
            -place, us, left=start, height=0.7, color=colour, edgecolor="#7f7f7f" if colour == "#ffffff" else colour
        )
        axes.annotate(f" {us:.0f}" if us >= 10 else f" {us:.1f}", (start + us, -place), va="center", fontsize=7)
    axes.set_yticks([-place for place in range(len(rows))], [row[0][:34] for row in rows], fontsize=7)
    axes.set(
        xlabel="microseconds",
        title="one layer, from one attention to the next (a kernel that starts early lies over others)",
    )
    axes.margins(x=0.06)
    axes.grid(True, axis="x", alpha=0.3)


def host_begin(step: dict[str, float], part: str) -> float:
    """When the host began a part of a step's work."""
    if part == "apply":
        return step["wait_begun"] + step["wait"]
    return step["begun"] + (step["schedule"] if part == "launch" else 0.0)


def draw_steps(axes: Axes, steps: Sequence[dict[str, float]]) -> None:
    """What the host and the device did, as the engine measured it without a profiler."""
    for part, colour in HOST.items():
        spans = [(host_begin(step, part), step[part]) for step in steps]
        axes.broken_barh(spans, (0.6, 0.8), facecolors=colour, label=part)
    axes.broken_barh(
        [(s["wait_begun"], s["wait"]) for s in steps], (0.9, 0.2), facecolors="#e8e8e8", label="ahead, waits"
    )
    for number, step in enumerate(steps):
        shade = COLOURS["attention"] if number % 2 else "#6fa8d6"
        axes.broken_barh([(step["device"], step["busy"])], (-0.4, 0.8), facecolors=shade)
    axes.set_yticks([1.0, 0.0], ["host", "device, by step"])
    axes.set(title="steps, not profiled")
    axes.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def draw_kinds(axes: Axes, measured: dict[str, float], floors: dict[str, float]) -> None:
    """Where a whole step's time goes, beside what its bytes or products alone need."""
    for place, parts in enumerate((floors, measured)):
        left = 0.0
        for kind, us in parts.items():
            axes.barh(place, us, left=left, height=0.6, color=COLOURS[kind], label=kind if place else None)
            if us > 0.04 * sum(measured.values()):
                axes.annotate(f"{us:,.0f}", (left + us / 2, place), ha="center", va="center", fontsize=8, color="white")
            left += us
    axes.set_yticks([0, 1], ["floor", "measured"])
    axes.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def draw_watch(axes: Axes, watch: dict[str, Any], card: str) -> None:
    """The card's clock and power while the workload went on and on, a sample every 50 ms. ``card``: its name, its limit W."""
    pairs = [tuple(float(word) for word in sample.split("/")) for sample in watch.get("course", [])]
    busy = [place for place, (_, watts) in enumerate(pairs) if watts > 300]
    if not busy:
        return
    shown = pairs[max(busy[0] - 1, 0) : busy[-1] + 1]
    seconds = [0.05 * i for i in range(len(shown))]
    axes.plot(seconds, [watts for _, watts in shown], color="#c0504d", label="power, W")
    axes.axhline(float(card.split(",")[1].split()[0]), color="#c0504d", linestyle=":", label="its limit, W")
    axes.plot(seconds, [clock for clock, _ in shown], color="#1b6ca8", label="clock, MHz")
    axes.set(xlabel="seconds of the workload, again and again", ylim=(0, 2100))
    axes.legend(ncols=3, fontsize=7, loc="lower right")
    axes.grid(True, alpha=0.3)


def decode(record: dict[str, Any]) -> Figure:
    """Steps of 256 rows."""
    found = record["decode"]
    layers, kv = found["layers"], found["kv_bytes"] / found["layers"]
    floors = {
        "bytes of keys and values": kv / BYTES_PER_US,
        "bytes of weights": found["layer_weight_bytes"] / BYTES_PER_US,
    }
    figure, axes = plt.subplots(4, 1, figsize=(10.4, 11.5), height_ratios=[1, 2.6, 1, 1.5])
    draw_steps(axes[0], found["steps"])
    draw_layer(axes[1], found["layer"], floors)
    least = {"attention": floors["bytes of keys and values"] * layers, "products": found["weight_bytes"] / BYTES_PER_US}
    draw_kinds(axes[2], by_kind(found["step_us"]), least)
    axes[2].set_title("a step's kernels, profiled, and its bytes at 4.44 TB/s")
    draw_watch(axes[3], found["watch"], record["card"])
    figure.suptitle(heading(record, f"decode steps of {found['rows']} rows of about 500 tokens"))
    return figure


def prefill(record: dict[str, Any]) -> Figure:
    """64 prompts of 1024 tokens."""
    found = record["prefill"]
    tokens, steps = found["tokens"], found["tokens"] / 8192
    layers = record["decode"]["layers"]
    floors = {"products at 790 TFLOP/s": found["flop"] / steps / layers / FLOPS_PER_US}
    figure, axes = plt.subplots(3, 1, figsize=(10.4, 8.6), height_ratios=[2.6, 1, 1.6])
    draw_layer(axes[0], found["layer"], floors)
    draw_kinds(axes[1], by_kind(found["call_us"]), {"products": found["flop"] / FLOPS_PER_US})
    calls = " ".join(f"{ms:.0f}" for ms in found["calls_ms"])
    axes[1].set_title(f"a call of {tokens:,} tokens ({calls} ms unprofiled), and its products at 790 TFLOP/s")
    draw_watch(axes[2], found["watch"], record["card"])
    figure.suptitle(heading(record, "prefill in steps of 8,192 tokens"))
    return figure


def least_us(point: dict[str, float], model: dict[str, float]) -> float:
    """What the bytes of some steps, or their products, alone need: every token goes through the layers, every row's last one
    through the output layer, too. An element of a weight has two bytes, and a token takes two operations of it."""
    layers = model["layers"] * model["layer_weight_bytes"]
    head = model["weight_bytes"] - layers
    flop = point["tokens"] * layers + point["rows"] * point["steps"] * head
    return max((point["weight_bytes"] + point["kv_bytes"]) / BYTES_PER_US, flop / FLOPS_PER_US)


def nano(record: dict[str, Any]) -> Figure:
    """The whole nano-vllm bench, step by step."""
    found = record["nano"]
    points = found["points"]
    at = [point["at"] / 1e3 for point in points]
    floors = [least_us(point, record["decode"]) for point in points]
    spent, least = sum(p["busy_us"] for p in points) / 1e6, sum(floors) / 1e6
    idle = sum(p["idle_us"] for p in points) / 1e3
    figure, axes = plt.subplots(2, 1, figsize=(10.4, 6.4), sharex=True, height_ratios=[2, 1])
    axes[0].step(
        at, [p["busy_us"] / p["steps"] / 1e3 for p in points], where="post", color=COLOURS["attention"], label="a step"
    )
    ideal = [floor / p["steps"] / 1e3 for floor, p in zip(floors, points, strict=True)]
    axes[0].step(at, ideal, where="post", color="#7f7f7f", linestyle="--", label="its bytes or products alone")
    axes[0].set(ylabel="ms on the device", yscale="log")
    axes[0].legend()
    axes[1].step(at, [p["rows"] for p in points], where="post", color="#4f9d4f")
    axes[1].set(xlabel="seconds since the start", ylabel="rows")
    for panel in axes:
        panel.grid(True, alpha=0.3)
    rate, best = found["tokens"] / found["seconds"], found["tokens"] / least
    words = f"{rate:,.0f} tokens/s; device {spent:.2f} s, idle {idle:.1f} ms; floor {least:.2f} s, {best:,.0f} tokens/s"
    figure.suptitle(heading(record, f"nano-vllm bench: {words}"))
    return figure


def heading(record: dict[str, Any], words: str) -> str:
    card = record["card"].split(",")[0]
    return f"{TITLES.get(record['model'], record['model'])}, {words}\n{card}, commit {record['commit']}"


VIEWS: dict[str, Callable[[dict[str, Any]], Figure]] = {"decode": decode, "prefill": prefill, "nano": nano}


def draw(folder: Path, images: Path) -> list[str]:
    """Write a plot of each record's workloads; gives their names."""
    drawn = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for view, plot in VIEWS.items():
            if view in record:
                figure = plot(record)
                figure.tight_layout()
                name = f"timeline-{record['model'].replace('_', '-')}-{view}.png"
                figure.savefig(images / name, dpi=90, metadata={"Software": None})
                plt.close("all")
                drawn.append(name)
    return drawn


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--records", type=Path, default=Path("bench/reports/timelines"))
    parser.add_argument("--images", type=Path, default=Path("docs/img"))
    options = parser.parse_args()
    print(", ".join(draw(options.records, options.images)))


if __name__ == "__main__":
    main()
