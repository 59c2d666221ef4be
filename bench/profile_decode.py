"""Where a decode step's microseconds go on the card: kernel by kernel, beside the unprofiled step and the host's own time.

    python bench/profile_decode.py --model qwen3_06b [--rows 1,8,64,256] [--context 512]

A shape of the anchors by its name, with the arguments of its engine, or a folder with a config.json.

GPU busy is kernel time (profiled) over the step (unprofiled): the profiler slows the host, so its own idle time says nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from headway.cli.bench.anchors.context import engine_of, find_model
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore

STEPS = 100


def start(core: EngineCore, rows: int, context: int, temperature: float) -> None:
    """Put ``rows`` requests into steady decode."""
    rng = random.Random(rows)
    for row in range(rows):
        params = SamplingParams(temperature=temperature, max_tokens=1000, ignore_eos=True, detokenize=False)
        prompt = [rng.randrange(10_000) for _ in range(context)]
        core.add(
            AddRequest(request_id=f"{rows}-{row}", prompt_token_ids=prompt, params=params, seed=row, eos_token_ids=[])
        )
    while core.stats().num_waiting or core.stats().num_running < rows:
        core.step()
    for _ in range(30):
        core.step()


def stop(core: EngineCore, rows: int) -> None:
    """End them."""
    for row in range(rows):
        core.abort(f"{rows}-{row}")
    while core.has_work():
        core.step()


def covered(events: Iterable[Any]) -> float:
    """Microseconds in which something ran on the device; kernels that start early lie over the ones they wait for."""
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in events if e.device_type == torch.autograd.DeviceType.CUDA
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def main() -> None:
    """Print one table per row count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--run-ahead", default="auto")
    parser.add_argument(
        "--host", type=int, default=0, help="also list this many functions of the host's time (cProfile)"
    )
    options = parser.parse_args()
    ahead = options.run_ahead if options.run_ahead == "auto" else int(options.run_ahead)
    folder = find_model(options.model)
    given: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 256}
    core = build_engine(EngineArgs(model=str(folder), run_ahead=ahead, **given | engine_of(folder)))
    for rows in (int(word) for word in options.rows.split(",")):
        start(core, rows, options.context, options.temperature)
        begin, waited = time.perf_counter(), core.stats().back_pressure_seconds
        for _ in range(STEPS):
            core.step()
        step_us = (time.perf_counter() - begin) / STEPS * 1e6
        wait_us = (core.stats().back_pressure_seconds - waited) / STEPS * 1e6
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(STEPS):
                core.step()
            torch.cuda.synchronize()
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                totals[event.name][0] += event.device_time_total
                totals[event.name][1] += 1
        busy_us = covered(trace.events()) / STEPS
        count = sum(number for _, number in totals.values()) / STEPS
        print(
            f"\nrows {rows}: step {step_us:.0f} us, host {step_us - wait_us:.0f} us, kernels {busy_us:.0f} us "
            f"({count:.0f} a step), busy {busy_us / step_us:.1%}, depth {core.stats().run_ahead}"
        )
        for name, (time_us, number) in sorted(totals.items(), key=lambda item: -item[1][0])[: options.top]:
            print(f"  {time_us / STEPS:8.1f} us {number / STEPS:6.1f} x {time_us / number:7.2f}  {name[:90]}")
        if options.host:
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(STEPS):
                core.step()
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(options.host)
        stop(core, rows)
    core.shutdown()


if __name__ == "__main__":
    main()
