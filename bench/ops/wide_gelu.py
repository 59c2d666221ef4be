"""Forms of ``wide_gelu`` beside each other, and beside cuBLAS with a GELU of its own: results first, then times.

    PYTHONPATH=. python bench/ops/wide_gelu.py [--json FILE]

Forms: two or four warps that finish tiles compute GELU beside the next tile's products, or two warpgroups take turns. Each
time is said as a multiple of the best form's, too; ``gelu_warps`` chooses what is marked.

``short`` is the best of several graphs, ``hot`` the mean over a longer time, with the card's clock where its power holds it.
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

from headway.kernels.capability import num_sms
from headway.kernels.silu_mul import gelu
from headway.kernels.wide_linear.hopper.launch import launch_gelu
from headway.kernels.wide_linear.tiles import gelu_warps

SHAPES = [(768, 3072), (1024, 4096), (384, 1536), (1280, 5120)]
"""(inputs, outputs). The last is held out: nothing is chosen by it."""
TOKENS = (8192, 2048)
FORMS = {"turns": 0, "two warps": 2, "four warps": 4}
ODD = (1, 257, 2048)
"""Numbers of tokens that are checked."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def made(tokens: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias; sums from -6 to 6."""
    like = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    return like(tokens, inputs), like(outputs, inputs) * inputs**-0.5, like(outputs)


def check(warps: int, inputs: int, outputs: int) -> str:
    """Whether results are within their rounding, and bits depend on a token's own inputs alone."""
    worst = 0.0
    for tokens in ODD:
        torch.manual_seed(tokens)
        x, weight, bias = made(tokens, inputs, outputs)
        first, again, some = torch.empty(3, tokens, outputs, dtype=x.dtype, device="cuda")
        launch_gelu(x, weight, bias, first, False, warps)
        sums = F.linear(x.double(), weight.double(), bias.double())
        exact = 0.5 * sums * torch.special.erfc(sums * -(0.5**0.5))
        bound = exact.abs() * 2.0**-8 * 1.22 + sums.abs() * 2.0**-8 * 1.13 + 4e-5
        worst = max(worst, float(((first.double() - exact).abs() / bound).max()))
        for _ in range(20):
            launch_gelu(x, weight, bias, again, False, warps)
            if not torch.equal(first, again):
                return "WRONG: bits move from run to run"
        launch_gelu(x[-5:], weight, bias, some[-5:], False, 2)
        if not torch.equal(some[-5:], first[-5:]):
            return "WRONG: bits depend on the other tokens, or on the form"
    return f"{'right' if worst <= 1.0 else 'WRONG'}, {worst:.2f} of what rounding allows"


def hot(call: Callable[[], Any], seconds: float) -> float:
    """Microseconds a call takes over ``seconds``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    graph.replay()
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        count += 200
    return (time.perf_counter() - begin) / count * 1e6


def best_of_two(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, tuple[float, float]]:
    """(short, hot) of each, timed twice in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(2):
        for name, call in calls.items():
            times[name].append((time_calls([call]), hot(call, seconds)))
    return {name: (min(a[0], b[0]), min(a[1], b[1])) for name, (a, b) in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.06, help="of each of two long measurements")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, wrong = [], False
    for inputs, outputs in SHAPES:
        for form, warps in FORMS.items():
            said = check(warps, inputs, outputs)
            say(f"check {inputs} x {outputs} {form}: {said}")
            wrong = wrong or not said.startswith("right")
    for (inputs, outputs), tokens in ((shape, tokens) for shape in SHAPES for tokens in TOKENS):
        x, weight, bias = made(tokens, inputs, outputs)
        out = torch.empty(tokens, outputs, dtype=x.dtype, device="cuda")
        calls: dict[str, Callable[[], Any]] = {
            "cuBLAS alone": partial(F.linear, x, weight, bias),
            "cuBLAS, gelu": lambda x=x, w=weight, b=bias: gelu(F.linear(x, w, b)),
        }
        for form, warps in FORMS.items():
            calls[form] = partial(launch_gelu, x, weight, bias, out, False, warps)
        times = best_of_two(calls, options.seconds)
        chosen = gelu_warps(tokens, outputs, inputs, num_sms(x.device))
        least = min(times[form][0] for form in FORMS)
        for name, (short, warm) in times.items():
            rates = f"{2.0 * tokens * inputs * outputs / short / 1e6:6.0f} TFLOP/s"
            mark = (
                f"{short / least:6.3f} of the best{', chosen' if FORMS[name] == chosen else ''}"
                if name in FORMS
                else ""
            )
            say(f"{tokens:6d} x {inputs} x {outputs}  {name:14s} {short:8.1f} short {warm:8.1f} hot us  {rates} {mark}")
            found.append(
                {"tokens": tokens, "inputs": inputs, "outputs": outputs, "form": name, "short": short, "hot": warm}
            )
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    return int(wrong)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
