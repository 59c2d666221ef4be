"""Records where the time of the workloads that miss their goals goes: a few steps, one layer, the card's clock and power.

    python -m bench.timelines --model headway/cli/bench/anchors/models/qwen3_06b --commit 1234567 --json FILE     on a GPU

``bench.timeline_plots`` draws what it writes. Three workloads of ``headway bench anchors``:

- ``decode``: steps of 256 rows around the mean length. The host's and the device's times of unprofiled steps are those that the
  engine measures itself; one layer and the sums by kernel come from the profiler, which slows only the host.
- ``prefill``: 64 prompts of 1024 tokens, one layer of a full step, and calls one after the other while the card is watched.
- ``nano``: all steps of the nano-vllm bench: rows, tokens, time on the device, and bytes that must be read.

Kernels that are launched early lie over the ones they wait for; the sums count a kernel from where the one before it ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.kernel_kinds import kind_of, short
from bench.profile_decode import start, stop
from bench.profile_prefill import Load, call, report_samples, sampled
from headway import LLM
from headway.cli.bench.anchors.floors import kv_bytes_per_token, num_weights
from headway.cli.bench.anchors.profiled import Event, Recorder, gained_us
from headway.cli.bench.offline import nano_workload
from headway.core.messages import StepTrace
from headway.engine.core import EngineCore
from headway.models.interface import ModelSpec
from headway.models.load import describe
from headway.weights import open_checkpoint

ROWS, CONTEXT = 256, 448
SHOWN_STEPS, PROFILED_STEPS = 6, 12
PREFILL = Load(prompts=64, tokens=1024)
NANO_PROMPTS, NANO_LENGTHS = 256, (100, 1024)
TOGETHER = 8
"""Steps of the nano bench that become one point."""


def kernels_of(events: Sequence[Event]) -> list[Event]:
    """By when they began."""
    return sorted((event for event in events if event.lane == "kernel"), key=lambda event: event.start)


def middle_layer(kernels: Sequence[Event]) -> list[list[Any]]:
    """[name, start, microseconds] of the kernels from one attention to the next, in the middle of the longest ones."""
    marks = [i for i, event in enumerate(kernels) if kind_of(short(event.name)) == "attention"]
    longest = max(kernels[i].us for i in marks)
    pairs = [(a, b) for a, b in pairwise(marks) if min(kernels[a].us, kernels[b].us) > 0.8 * longest]
    usual = sorted(b - a for a, b in pairs)[len(pairs) // 2]
    pairs = [(a, b) for a, b in pairs if b - a == usual]  # not over the end of a step
    first, last = pairs[len(pairs) // 2]
    begin = kernels[first].start
    return [[short(e.name), round(e.start - begin, 2), round(e.us, 2)] for e in kernels[first : last + 1]]


def advances(kernels: Sequence[Event]) -> dict[str, float]:
    """Microseconds by kernel: each from the end of all before it, or its own beginning, to its end."""
    found: dict[str, float] = {}
    for event, us in gained_us(kernels):
        name = short(event.name)
        found[name] = found.get(name, 0.0) + us
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def shown(traces: Sequence[StepTrace]) -> list[dict[str, float]]:
    """The host's and the device's spans of steps, in microseconds from the first step's beginning."""
    origin, steps = traces[0].begun, []
    for trace in traces:
        at = (trace.begun - origin) * 1e6
        step = {
            "begun": at, "schedule": trace.schedule_us, "launch": trace.launch_us, "wait_begun": at + trace.wait_begun_us,
            "wait": trace.wait_us, "apply": trace.apply_us, "device": at + trace.submitted_us + (trace.headway_us or 0.0),
            "busy": trace.busy_us or 0.0,
        }  # fmt: skip
        steps.append({name: round(value, 1) for name, value in step.items()})
    return steps


def watched(work: Callable[[], object], seconds: float) -> dict[str, Any]:
    """The card's clock and power during ``work`` again and again."""

    def again() -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            work()

    return report_samples(sampled(again)[1])


def decode(core: EngineCore, spec: ModelSpec) -> dict[str, Any]:
    """Steps of 256 rows."""
    start(core, ROWS, CONTEXT, 0.0)
    for _ in range(40):
        core.step()
    steps = shown(core.stats().recent_steps[-SHOWN_STEPS:])
    recorder = Recorder()
    with recorder:
        for _ in range(PROFILED_STEPS):
            core.step()
    watch = watched(lambda: [core.step() for _ in range(20)], 2.0)
    stop(core, ROWS)
    kernels = kernels_of(recorder.events)
    spent = {name: us / PROFILED_STEPS for name, us in advances(kernels).items()}
    length = CONTEXT + 80  # of the profiled steps
    return {
        "rows": ROWS, "steps": steps, "layer": middle_layer(kernels), "step_us": spent, "watch": watch,
        "layers": spec.num_layers, "layer_weight_bytes": 2 * layer_weights(spec),
        "weight_bytes": 2 * num_weights(spec), "kv_bytes": length * ROWS * kv_bytes_per_token(spec),
    }  # fmt: skip


def layer_weights(spec: ModelSpec) -> int:
    """Elements of a layer's matrices."""
    return spec.layer_weights // spec.num_layers


def prefill(llm: LLM, spec: ModelSpec) -> dict[str, Any]:
    """Full steps of prompts."""
    for seed in range(2):
        call(llm, seed, PREFILL)
    recorder = Recorder()
    with recorder:
        call(llm, 2, PREFILL)
    kernels = kernels_of(recorder.events)
    watch = watched(lambda: call(llm, 3, PREFILL), 3.0)
    tokens = PREFILL.prompts * PREFILL.tokens
    return {
        "tokens": tokens, "layer": middle_layer(kernels), "call_us": advances(kernels), "watch": watch,
        "calls_ms": [round(call(llm, seed, PREFILL)[1] * 1e3, 2) for seed in (4, 5, 6)],
        "flop": 2 * tokens * layer_weights(spec) * spec.num_layers,
    }  # fmt: skip


def nano(llm: LLM, core: Any, spec: ModelSpec) -> dict[str, Any]:
    """Every step of the nano-vllm bench, ``TOGETHER`` of them a point."""
    prompts, params = nano_workload(NANO_PROMPTS, llm.model_info.vocab_size, False, NANO_LENGTHS)
    llm.generate(prompts, params, use_tqdm=False)
    log: list[tuple[StepTrace, int]] = []
    meter, plain = core._meter, core._meter.applied  # noqa: SLF001 - the bench takes the engine apart

    def applied(step: Any, asked: float, arrived: float) -> StepTrace:
        trace: StepTrace = plain(step, asked, arrived)
        log.append((trace, int(step.plan.starts_bound.sum())))
        return trace

    meter.applied = applied
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    del meter.applied
    weights, each = num_weights(spec), kv_bytes_per_token(spec)
    points = []
    for first in range(0, len(log), TOGETHER):
        group = log[first : first + TOGETHER]
        points.append({
            "at": round((group[0][0].begun - begin) * 1e3, 2), "steps": len(group),
            "rows": round(sum(t.rows for t, _ in group) / len(group), 1), "tokens": sum(t.tokens for t, _ in group),
            "busy_us": round(sum(t.busy_us or 0.0 for t, _ in group), 1),
            "idle_us": round(sum(t.idle_us or 0.0 for t, _ in group), 1),
            "weight_bytes": 2 * weights * len(group), "kv_bytes": each * sum(context for _, context in group),
        })  # fmt: skip
    return {"seconds": round(seconds, 3), "tokens": sum(p.max_tokens or 0 for p in params), "points": points}


def card() -> str:
    """Its name and power limit."""
    query = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def main() -> None:
    """Record one model's workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    llm = LLM(
        options.model, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096,
        max_num_seqs=512, enable_prefix_caching=False,
    )  # fmt: skip
    gc.collect()
    gc.freeze()
    core: Any = llm._client._core  # type: ignore[attr-defined]  # noqa: SLF001
    spec = describe(open_checkpoint(options.model, load_format="dummy").config)
    found: dict[str, Any] = {
        "model": Path(options.model).name, "commit": options.commit, "card": card(), "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    views: dict[str, Callable[[], dict[str, Any]]] = {
        "nano": lambda: nano(llm, core, spec),
        "decode": lambda: decode(core, spec),
        "prefill": lambda: prefill(llm, spec),
    }
    for name, view in views.items():
        print(f"== {name}", flush=True)
        found[name] = view()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    llm.close()


if __name__ == "__main__":
    main()
