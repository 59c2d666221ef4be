"""Our CPU products beside torch's, for layers of several models and any number of rows, in the same run.

    python bench/cpu_linear.py [--rows 1,4,16,64,512] [--dtypes bfloat16,float32] [--seconds 0.5] [--megabytes 60]
        [--processor-time]

Each figure is the shortest of the calls made in turn in ``--seconds``, its mean over copies of the layer that hold
``--megabytes`` together, so that weights come from beyond the second cache as a model's do; 0: one copy, which may stay there.
``--processor-time`` counts one thread's own seconds, which other processes hardly change: run it with OMP_NUM_THREADS=1.
HEADWAY_CPU names the set of instructions; torch's libraries are held to one as ``bench/cpu_vs_transformers.py`` says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from headway.kernels.cpu.instructions import cpu_name
from headway.kernels.linear import PackedLinear

SHAPES = {
    "SmolLM2-135M gate_up": (576, 3072),
    "Qwen3-0.6B down": (3072, 1024),
    "Llama-1B qkv": (2048, 3072),
    "odd": (1026, 777),
}


def best_us(
    calls: list[Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The shortest time of each call in microseconds; made in turn, at least twice."""
    best, end, rounds = [float("inf")] * len(calls), time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = clock()
            call()
            best[index] = min(best[index], clock() - start)
        rounds += 1
    return [seconds * 1e6 for seconds in best]


def main() -> None:
    """Print GFLOP/s of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--processor-time", action="store_true", help="of one thread, instead of the clock's")
    options = parser.parse_args()
    clock = time.thread_time if options.processor_time else time.perf_counter
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}; GFLOP/s of ours / torch's")
    for name in options.dtypes.split(","):
        dtype: torch.dtype = getattr(torch, name)
        for label, (inputs, outputs) in SHAPES.items():
            copies = max(1, options.megabytes * 2**20 // (inputs * outputs * dtype.itemsize))
            weights = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in range(copies)]
            packed, parts = [PackedLinear(weight) for weight in weights], []
            for rows in (int(word) for word in options.rows.split(",")):
                x = torch.randn(rows, inputs).to(dtype)
                calls: list[Callable[[], object]] = [partial(layer, x) for layer in packed]
                calls += [partial(F.linear, x, weight) for weight in weights]
                found = best_us(calls, options.seconds, clock)
                times = [sum(found[:copies]) / copies, sum(found[copies:]) / copies]
                rates = [2e-3 * rows * inputs * outputs / microseconds for microseconds in times]
                parts.append(f"{rows}: {rates[0]:.0f}/{rates[1]:.0f} {rates[0] / rates[1]:.2f}x")
            print(f"{name:9} {label:22} " + "  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
