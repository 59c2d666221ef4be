"""Where the wall time of models that pool goes between kernels: steps by device events, the host by part, clocks, bare graphs.

    python -m bench.text_steps --model headway/cli/bench/anchors/models/bert_base [--lengths 128,510] [--texts 4096]

For each length: the wall time of a call; steps' time on the device and its idle time between them, by two events a step; the
share of tokens that are padding; the host's time a step by part; what passes before the first step and after the last one; the
card's clock and power; and the graph that the steps replayed, over and over, with nothing between: alone, and after rests, when
the card is cool. If bare replays take as long as steps, the kernels are the bound and not the host.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import time
from typing import Any

import torch

from headway import LLM
from headway.cli.bench.anchors.context import random_prompts
from headway.device.step_clock import StepClock, StepEvents, StepTimes
from headway.runner.executor import Executor, Running
from headway.runner.launch import Launch, LaunchShape
from headway.scheduler.one_pass import OnePassScheduler

PARTS = ("schedule", "launch", "apply", "back_pressure")
REPLAYS, RESTS = 100, 10
SMI = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


class Record:
    """What one engine in this process did: its methods are wrapped."""

    def __init__(self) -> None:
        self.times: list[StepTimes | None] = []
        self.launched: list[tuple[float, float]] = []
        self.collected: list[tuple[float, float]] = []
        self.shapes: list[tuple[LaunchShape, LaunchShape]] = []
        self.parts: dict[str, list[float]] = {"schedule": [], "replay": [], "pack": [], "apply": []}
        self.last: tuple[Executor, LaunchShape, Launch] | None = None
        self._wrap()

    def clear(self) -> None:
        """Forget all but the last step."""
        kept: tuple[list[Any], ...] = (self.times, self.launched, self.collected, self.shapes, *self.parts.values())
        for each in kept:
            each.clear()

    def _timed(self, owner: type, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            found = inner(*args, **named)
            self.parts[part].append(time.perf_counter() - begin)
            return found

        setattr(owner, name, timed)

    def _wrap(self) -> None:
        from headway.runner.packer import Packer

        self._timed(OnePassScheduler, "schedule", "schedule")
        self._timed(OnePassScheduler, "apply", "apply")
        self._timed(Packer, "pack", "pack")
        run, collect, measure, replay = Executor.run, Executor.collect, StepClock.measure, Executor._replay  # noqa: SLF001

        def timed_run(executor: Executor, launch: Launch, *args: Any) -> Running:
            begin = time.perf_counter()
            found = run(executor, launch, *args)
            self.launched.append((begin, time.perf_counter()))
            return found

        def timed_collect(executor: Executor, step: Running) -> Any:
            begin = time.perf_counter()
            found = collect(executor, step)
            self.collected.append((begin, time.perf_counter()))
            return found

        def kept(clock: StepClock, events: StepEvents) -> StepTimes | None:
            self.times.append(measure(clock, events))
            return self.times[-1]

        def noted(executor: Executor, launch: Launch, num_edits: int) -> Any:
            begin = time.perf_counter()
            found = replay(executor, launch, num_edits)
            self.parts["replay"].append(time.perf_counter() - begin)
            if found is not None:
                self.shapes.append((launch.shape, found[1]))
                self.last = executor, found[1], launch
            return found

        wrapped: Any = Executor
        wrapped.run, wrapped.collect, wrapped._replay = timed_run, timed_collect, noted  # noqa: SLF001
        wrapped = StepClock
        wrapped.measure = kept


def smi() -> str:
    """The card's clocks, power and what holds them down."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()[0]


def us(seconds: list[float]) -> str:
    """Median and largest of host times."""
    return f"{statistics.median(seconds) * 1e6:.0f} ({max(seconds) * 1e6:.0f})" if seconds else "-"


def bare(record: Record) -> str:
    """Milliseconds of the last step's graph: replayed back to back, and alone after a rest of 50 ms each."""
    assert record.last is not None, "steps ran without graphs"
    executor, shape, launch = record.last
    assert executor._graphs is not None  # noqa: SLF001
    graphs, device = executor._graphs[1], executor.device  # noqa: SLF001
    with device.main.active(), torch.inference_mode():

        def spell(number: int) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(number):
                graphs.replay(shape, launch.variant)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / number

        rested = []
        for _ in range(RESTS):
            time.sleep(0.05)
            rested.append(spell(1))
        begin = time.perf_counter()
        graphs.replay(shape, launch.variant)
        launched = time.perf_counter() - begin
        few, many, most = spell(10), spell(REPLAYS), spell(3 * REPLAYS)
    return (
        f"{shape.tokens} tokens, {shape.rows} rows of up to {shape.longest}: rested {statistics.median(rested):.3f} ms, "
        f"back to back 10: {few:.3f}, {REPLAYS}: {many:.3f}, {3 * REPLAYS}: {most:.3f} ms; "
        f"host of a launch {launched * 1e6:.0f} us; card {smi()}"
    )


def report(llm: LLM, record: Record, prompts: list[list[int]], length: int) -> None:
    """One call, in numbers."""
    task = llm.model_info.tasks[0]
    llm.encode(prompts, pooling_task=task, use_tqdm=False)
    record.clear()
    before, begin = llm.stats(), time.perf_counter()
    llm.encode(prompts, pooling_task=task, use_tqdm=False)
    end, after = time.perf_counter(), llm.stats()
    card, wall = smi(), (end - begin) * 1e3
    times = [each for each in record.times if each is not None]
    busy, idle = sum(each.busy for each in times) / 1e3, sum(each.idle for each in times[1:]) / 1e3
    print(
        f"\n{length} tokens: {len(prompts) / wall * 1e3:,.0f} texts/s, wall {wall:.1f} ms, {len(times)} steps; card {card}"
    )
    shapes = record.shapes
    real, padded = sum(each.tokens for each, _ in shapes), sum(each.tokens for _, each in shapes)
    kinds = {f"{a.tokens} x {a.rows} in {b.tokens} x {b.rows} x {b.longest}" for a, b in shapes}
    print(
        f"  padding {1 - real / max(padded, 1):.2%} of {padded} tokens, {len(shapes)} steps replayed: {sorted(kinds)}"
    )
    middle = sorted(each.busy for each in times)
    print(
        f"  device: steps {busy:.1f} ms ({busy / wall:.1%}), median {statistics.median(middle):.0f} us, "
        f"10 % and 90 % {middle[len(middle) // 10]:.0f} and {middle[len(middle) * 9 // 10]:.0f}; "
        f"idle between steps {idle:.1f} ms ({idle / wall:.1%}), in {sum(each.idle > 0 for each in times[1:])} gaps; "
        f"headway median {statistics.median(each.headway for each in times):.0f} us"
    )
    each_step = [f"{each.busy:.0f}" + (f"+{each.idle:.0f} idle" if each.idle else "") for each in times[:24]]
    print("  by step, us: " + ", ".join(each_step))
    first, last = (record.launched[0][0] - begin) * 1e3, (end - record.collected[-1][1]) * 1e3
    print(
        f"  before the first step {first:.1f} ms ({first / wall:.1%}), after the last result {last:.1f} ms ({last / wall:.1%})"
    )
    runs, waits = [b - a for a, b in record.launched], [b - a for a, b in record.collected]
    between = [record.launched[i + 1][0] - record.launched[i][1] for i in range(len(record.launched) - 1)]
    named = ", ".join(f"{name} {us(each)}" for name, each in record.parts.items())
    print(
        f"  host a step, us, median (most): {named}, run {us(runs)}, collect {us(waits)}, from launch to launch {us(between)}"
    )
    parts = {name: (getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds")) * 1e3 for name in PARTS}
    print("  host in all, ms: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()))
    print("  bare graph: " + bare(record))


def main() -> None:
    """Print a block per length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", default="128,510")
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    options = parser.parse_args()
    record, random_ids = Record(), random.Random(3)
    made = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
    with LLM(options.model, max_num_batched_tokens=options.max_num_batched_tokens, **made) as llm:
        gc.collect()
        gc.freeze()  # as the engine's own process does: else a full collection takes a tenth of a second of some call
        for length in (int(word) for word in options.lengths.split(",")):
            report(llm, record, random_prompts(random_ids, options.texts, length, llm.model_info.vocab_size), length)


if __name__ == "__main__":
    main()
