"""The gated MLP's first product for many tokens: cuBLAS and ``silu_mul`` against one kernel, on the card.

    python bench/ops/wide_linear.py [--tokens 8192 4096] [--sustained 2] [--json FILE]

Results are compared with the reference first, on odd sizes too. ``short`` is the best of several graphs of a few milliseconds,
``sustained`` the mean over ``--sustained`` seconds, when the card may have lowered its clock to keep within its power.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import time_calls

from headway.kernels.silu_mul import silu_mul
from headway.kernels.wide_linear.launch import launch

SHAPES = {"qwen3-0.6b": (3072, 1024), "llama-8b": (14336, 4096)}
"""(outputs, inputs)."""
ODD = [(1, 128, 64), (63, 8, 64), (129, 136, 192), (1000, 3072, 1024), (257, 1000, 320), (8192, 3072, 1024)]
GROUPS = (4, 8, 16, 32)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def inputs(tokens: int, outputs: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda")
    return x, torch.randn(2 * outputs, size, dtype=torch.bfloat16, device="cuda") * size**-0.5


def check() -> None:
    """Two roundings of the same sums, and the same bits whenever it is run again."""
    for tokens, outputs, size in ODD:
        x, weight = inputs(tokens, outputs, size)
        guarded = torch.full((tokens + 64, outputs), 7.0, dtype=x.dtype, device="cuda")
        out = guarded[:tokens]
        launch(x, weight, out)
        torch.cuda.synchronize()
        expected = silu_mul.reference(F.linear(x, weight)).float()
        error = float((out.float() - expected).abs().max() / expected.abs().max())
        first = out.clone()
        same = True
        for _ in range(20):
            launch(x, weight, out)
            same = same and torch.equal(first, out)
        kept = bool((guarded[tokens:] == 7.0).all())
        say(
            f"check {tokens} x {outputs} x {size}: error {error:.4f} of the largest, same bits {same}, beyond kept {kept}"
        )
        if not (error < 0.02 and same and kept):
            raise SystemExit("wrong")


def separate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul(F.linear(x, weight))


def sustained(call: Callable[[], Any], seconds: float) -> float:
    """Microseconds per call over ``seconds``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    graph.replay()
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    start.record()
    while time.perf_counter() - begin < seconds:
        graph.replay()
        count += 10
        if count % 100 == 0:
            torch.cuda.synchronize()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--sustained", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check()
    found = []
    for name, (outputs, size) in SHAPES.items():
        for tokens in options.tokens:
            x, weight = inputs(tokens, outputs, size)
            out = torch.empty(tokens, outputs, dtype=x.dtype, device="cuda")
            calls: dict[str, Callable[[], Any]] = {
                "product alone": partial(F.linear, x, weight), "product, then silu": partial(separate, x, weight),
            }  # fmt: skip
            calls |= {f"one kernel, groups of {group}": partial(launch, x, weight, out, group) for group in GROUPS}
            for label, call in calls.items():
                call()
                figures = {"short": time_calls([call], least=10)}
                if options.sustained:
                    figures["sustained"] = sustained(call, options.sustained)
                for way, us in figures.items():
                    rate = 4.0 * tokens * outputs * size / us / 1e6
                    say(f"{name:11s} {tokens:6d} {label:26s} {way:10s} {us:9.1f} us {rate:6.1f} TFLOP/s")
                    found.append({"model": name, "tokens": tokens, "what": label, "way": way, "us": us, "tflops": rate})
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
