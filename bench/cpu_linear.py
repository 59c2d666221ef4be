"""Our CPU products beside torch's, for layers of several models and any number of rows, in the same run.

    python bench/cpu_linear.py [--rows 1,2,4,8,16,64,256] [--dtypes bfloat16,float32] [--seconds 0.2]

Each figure is the shortest of the calls made in turn in ``--seconds``. The weights of one layer may stay in the last cache, so
that arithmetic shows; what memory costs is in ``bench/cpu_decode.py``.
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


def best_us(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """The shortest time of each call in microseconds; made in turn, at least twice."""
    best, end, rounds = [float("inf")] * len(calls), time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
        rounds += 1
    return [seconds * 1e6 for seconds in best]


def main() -> None:
    """Print GFLOP/s of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,64,256")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--seconds", type=float, default=0.2)
    options = parser.parse_args()
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}; GFLOP/s of ours / torch's")
    for name in options.dtypes.split(","):
        dtype: torch.dtype = getattr(torch, name)
        for label, (inputs, outputs) in SHAPES.items():
            weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
            packed, parts = PackedLinear(weight), []
            for rows in (int(word) for word in options.rows.split(",")):
                x = torch.randn(rows, inputs).to(dtype)
                times = best_us([partial(packed, x), partial(F.linear, x, weight)], options.seconds)
                rates = [2e-3 * rows * inputs * outputs / microseconds for microseconds in times]
                parts.append(f"{rows}: {rates[0]:.0f}/{rates[1]:.0f} {rates[0] / rates[1]:.2f}x")
            print(f"{name:9} {label:22} " + "  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
