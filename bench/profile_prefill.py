"""Where the time of a long prefill goes on the card: 64 prompts of 1024 tokens, one token each, through ``LLM.generate``.

    python bench/profile_prefill.py --model headway/cli/bench/anchors/models/qwen3_06b [--seconds 4] [--json FILE]
    python bench/profile_prefill.py --model ... --prompts 1 --tokens 512 --calls 20                    a lone prompt

Four views. ``runs``: wall time of several calls. ``steps``: of the last of them, the host's and the device's time of each step
as the engine itself measures them, and what lies before the first step and behind the last. ``profile``: of one more call under
the profiler, kernel by kernel, and every pause of the device with what the host did meanwhile; the profiler slows the host.
``sustained``: calls for ``--seconds``, with the card's clock and power meanwhile: a card at its power limit lowers its clock,
which a short bench does not see.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from headway import LLM, SamplingParams
from headway.api.inputs import Door
from headway.engine.core import EngineCore
from headway.models.layers.forms import rules_for
from headway.runner.runner import ModelRunner
from headway.scheduler import Scheduler

WORDS = 10_000
PAUSE_US = 5.0
"""Shorter pauses of the device are only added up."""
PHASES: list[tuple[type, str]] = [
    (Door, "prepare"), (EngineCore, "add"), (Scheduler, "schedule"), (ModelRunner, "launch"), (ModelRunner, "collect"),
    (Scheduler, "apply"),
]  # fmt: skip
SMI = [
    "nvidia-smi", "-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], "--format=csv,noheader,nounits",
    "--query-gpu=clocks.sm,power.draw.instant,temperature.gpu,clocks_event_reasons.active", "-lms", "50",
]  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What a call asks for."""

    prompts: int
    tokens: int


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def call(llm: LLM, seed: int, load: Load) -> tuple[float, float, list[int]]:
    """(perf_counter at the start, seconds, tokens) of one call of ``generate``."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(WORDS) for _ in range(load.tokens)] for _ in range(load.prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(list(prompts), [params] * load.prompts, use_tqdm=False)
    return start, time.perf_counter() - start, [output.outputs[0].token_ids[0] for output in outputs]


def steps(llm: LLM, start: float, seconds: float, before: int) -> dict[str, Any]:
    """The steps of the call just made; times in milliseconds from its start."""
    traces = [trace for trace in llm.stats().recent_steps if trace.step >= before]
    rows = []
    say("  step tokens  begun  sched launch   wait  apply   busy   idle headway   (ms)")
    for trace in traces:
        row = {
            "tokens": trace.tokens, "begun": (trace.begun - start) * 1e3, "schedule": trace.schedule_us / 1e3,
            "launch": trace.launch_us / 1e3, "wait": trace.wait_us / 1e3, "apply": trace.apply_us / 1e3,
            "wait_begun": (trace.begun - start) * 1e3 + trace.wait_begun_us / 1e3,
            "busy": (trace.busy_us or 0.0) / 1e3, "idle": (trace.idle_us or 0.0) / 1e3,
            "headway": (trace.headway_us or 0.0) / 1e3,
        }  # fmt: skip
        rows.append(row)
        times = [
            f"{row[name]:6.2f}" for name in ("begun", "schedule", "launch", "wait", "apply", "busy", "idle", "headway")
        ]
        say(f"  {trace.step:4d} {row['tokens']:6d} {' '.join(times)}")
    last = rows[-1]
    after = seconds * 1e3 - (last["wait_begun"] + last["wait"])
    busy = sum(row["busy"] for row in rows)
    say(f"  wall {seconds * 1e3:.2f} ms: device {busy:.2f} in steps, first step begun at {rows[0]['begun']:.2f}, "
        f"behind the last result {after:.2f}")  # fmt: skip
    return {"wall_ms": seconds * 1e3, "busy_ms": busy, "after_ms": after, "steps": rows}


def wrapped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return inner


def host_during(spans: list[tuple[float, float, str]], start: float, end: float) -> str:
    """The host's calls that overlap a pause the most: the phase and, within it, the innermost call."""
    inside = [(min(end, b) - max(start, a), b - a, name) for a, b, name in spans if a < end and b > start]
    phases = [each for each in inside if each[2].startswith("phase ")]
    calls = sorted((each for each in inside if not each[2].startswith("phase ")), key=lambda each: -each[0])[:2]
    names = [f"{name} {overlap:.0f}" for overlap, _, name in sorted(phases, reverse=True)[:3]]
    return "; ".join(names + [f"{name[:40]} {overlap:.0f} of {whole:.0f}" for overlap, whole, name in calls])


def profiled(llm: LLM, seed: int, load: Load, top: int) -> dict[str, Any]:
    """One call under the profiler."""
    kept = [(owner, name, getattr(owner, name)) for owner, name in PHASES]
    for owner, name, function in kept:
        setattr(owner, name, wrapped(function, f"phase {owner.__name__}.{name}"))
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            with record_function("phase whole"):
                _, seconds, _ = call(llm, seed, load)
            torch.cuda.synchronize()
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)
    device, host = [], []
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in trace.events():
        span = (event.time_range.start, event.time_range.end, event.name)
        if event.device_type == DeviceType.CUDA and not event.name.startswith("phase "):
            device.append(span)
            totals[event.name][0] += span[1] - span[0]
            totals[event.name][1] += 1
        elif event.device_type == DeviceType.CPU and event.name != "phase whole":
            host.append(span)
    whole = next(e.time_range for e in trace.events() if e.name == "phase whole" and e.device_type == DeviceType.CPU)
    device.sort()
    pauses, reached, busy = [], whole.start, 0.0
    for start, end, name in device:
        if start > reached:
            pauses.append((start - reached, reached, start, name))
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    pauses.append((whole.end - reached, reached, whole.end, "(end)"))
    short = sum(pause[0] for pause in pauses if pause[0] < PAUSE_US)
    wall = whole.end - whole.start
    say(f"  profiled: wall {wall / 1e3:.2f} ms ({seconds * 1e3:.2f}), device busy {busy / 1e3:.2f}, "
        f"{sum(p[0] >= PAUSE_US for p in pauses)} pauses {sum(p[0] for p in pauses if p[0] >= PAUSE_US) / 1e3:.2f} ms, "
        f"{sum(p[0] < PAUSE_US for p in pauses)} short ones {short / 1e3:.2f} ms")  # fmt: skip
    listed = []
    for length, start, end, name in sorted(pauses, reverse=True)[:16]:
        if length < PAUSE_US:
            break
        line = f"{length:8.1f} us at {(start - whole.start) / 1e3:8.2f} ms before {name[:44]}: {host_during(host, start, end)}"
        listed.append(line)
        say("   " + line)
    kernels = []
    for name, (time_us, number) in sorted(totals.items(), key=lambda item: -item[1][0])[:top]:
        kernels.append({"name": name[:120], "total_ms": time_us / 1e3, "count": number, "each_us": time_us / number})
        say(f"   {time_us / 1e3:8.2f} ms {number:6.0f} x {time_us / number:8.1f} us  {name[:100]}")
    return {"wall_ms": wall / 1e3, "busy_ms": busy / 1e3, "short_ms": short / 1e3, "pauses": listed, "kernels": kernels}


def sampled(work: Callable[[], Any]) -> tuple[Any, list[list[str]]]:
    """``work()``, and what the card said every 50 ms: clock in MHz, watts, degrees, reasons for a lower clock (bits)."""
    try:
        watch = subprocess.Popen(SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return work(), []
    time.sleep(0.3)
    try:
        result = work()
    finally:
        watch.terminate()
        lines, _ = watch.communicate(timeout=10)
    return result, [[word.strip() for word in line.split(",")] for line in lines.splitlines() if line.count(",") == 3]


def report_samples(samples: list[list[str]]) -> dict[str, Any]:
    """Clock and power of the busy samples, and their course."""
    try:
        known = [(float(a), float(b), float(c), d) for a, b, c, d in samples]
    except ValueError:
        known = []
    if not known:
        say("  no samples of clock and power")
        return {}
    most = max(power for _, power, _, _ in known)
    busy = [each for each in known if each[1] > 0.6 * most]
    reasons: dict[str, int] = defaultdict(int)
    for each in busy:
        reasons[each[3]] += 1
    say(f"  clock {median(e[0] for e in busy):.0f} MHz (from {min(e[0] for e in busy):.0f} to "
        f"{max(e[0] for e in busy):.0f}), power {median(e[1] for e in busy):.0f} W (most {most:.0f}), "
        f"{max(e[2] for e in busy):.0f} degrees, reasons {dict(reasons)}")  # fmt: skip
    course = [f"{clock:.0f}/{power:.0f}" for clock, power, _, _ in known]
    say("  MHz/W every 50 ms: " + " ".join(course[:120]))
    return {"clock_mhz": median(e[0] for e in busy), "power_w": median(e[1] for e in busy), "reasons": dict(reasons),
            "course": course}  # fmt: skip


def sustained(llm: LLM, load: Load, seconds: float) -> dict[str, Any]:
    """Calls one after the other."""

    def work() -> list[float]:
        found, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds:
            found.append(call(llm, 1000 + len(found), load)[1])
        return found

    spent, samples = sampled(work)
    say(f"  sustained: {len(spent)} calls, first {spent[0] * 1e3:.1f}, median {median(spent) * 1e3:.1f}, last "
        f"{spent[-1] * 1e3:.1f} ms")  # fmt: skip
    return {"calls_ms": [each * 1e3 for each in spent], **report_samples(samples)}


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """All views of the engine as it is now."""
    spent, load = [], Load(options.prompts, options.tokens)
    start, seconds, before = 0.0, 0.0, 0
    tokens: list[int] = []
    for run in range(options.calls):
        time.sleep(options.rest)
        before = llm.stats().num_steps
        start, seconds, tokens = call(llm, run, load)
        spent.append(seconds * 1e3)
        say(f"call {run}: {seconds * 1e3:.2f} ms, {load.prompts * load.tokens / seconds:,.0f} tokens/s")
    found: dict[str, Any] = {"calls_ms": spent, "tokens": tokens, "last": steps(llm, start, seconds, before)}
    if options.seconds:
        found["sustained"] = sustained(llm, load, options.seconds)
    if options.top:
        found["profile"] = profiled(llm, 99, load, options.top)
    return found


WAYS = {"separate": (False, False), "wide": (True, False), "graphs": (True, True)}
"""Name -> whether wide products are used, and graphs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0, help="of the sustained calls; 0: none")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of rest before each of the calls")
    parser.add_argument("--top", type=int, default=24, help="kernels to list; 0: no profile")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["graphs"], help="one after the other")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(
        options.model, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096,
        max_num_seqs=512, enforce_eager="graphs" not in options.ways, enable_prefix_caching=False,
    )  # fmt: skip
    gc.collect()
    gc.freeze()
    core: Any = llm._client._core  # type: ignore[attr-defined]  # noqa: SLF001 - the bench takes the engine apart
    executor: Any = core._runner.executor  # noqa: SLF001
    model = executor.body.model
    rules, graphs = rules_for(model.device, model.dtype), executor._graphs  # noqa: SLF001
    answers: list[int] = []
    for way in options.ways:
        wide, replayed = WAYS[way]
        model.use_forms(rules if wide else replace(rules, wide=None))
        executor._graphs = graphs if replayed else None  # noqa: SLF001
        say(f"== {Path(options.model).name}, {way}")
        before = llm.stats().num_graph_steps
        found = measure(llm, options)
        say(f"  {llm.stats().num_graph_steps - before} steps were replayed")
        if answers:
            equal = sum(a == b for a, b in zip(answers, found["tokens"], strict=True))
            say(f"  {equal} of {options.prompts} tokens are those of the way before")
        answers = found["tokens"]
        if options.json:
            path = options.json.with_stem(f"{options.json.stem}_{way}")
            path.write_text(json.dumps({"model": Path(options.model).name, "way": way, **found}, indent=1))
    llm.close()


if __name__ == "__main__":
    main()
