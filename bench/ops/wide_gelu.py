"""Forms of ``wide_gelu`` beside each other, and beside cuBLAS with a GELU of its own: results first, then times.

    PYTHONPATH=. python bench/ops/wide_gelu.py [--json FILE]

Every shape is a process: they compile and check at once, and are timed one after the other. Forms:

    late2, late4  the op's kernel: two or four warps that finish tiles compute GELU, beside the next tile's products
    early         GELU by the warps that multiply, on sums that are not rounded
    old           the same by two functions of the slow unit, the bias asked for late
    turns         two warpgroups multiply in turns, each finishing its tile while the other multiplies

``short`` is the best of several graphs, ``hot`` the mean over a longer time, with the card's clock where its power holds it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
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
from headway.kernels.wide_linear import wide_gelu
from headway.kernels.wide_linear.hopper.forms import launch_form
from headway.kernels.wide_linear.tiles import tile_width

SHAPES = [(768, 3072), (1024, 4096), (384, 1536), (1280, 5120)]
"""(inputs, outputs). The last is held out: nothing is chosen by it."""
TOKENS = (8192, 2048)
FORMS = [("old", 256), ("old", 128), ("early", 256), ("early", 128), ("late2", 256), ("late2", 128), ("late4", 256),
         ("late4", 128), ("turns", 128)]  # fmt: skip
"""(form, weight rows of a tile)."""
ODD = (1, 257, 2048)
"""Numbers of tokens that are checked."""
ROUNDED = ("late2", "late4")
"""Those that round the sum before GELU."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def made(tokens: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias; sums from -6 to 6."""
    like = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    return like(tokens, inputs), like(outputs, inputs) * inputs**-0.5, like(outputs)


def check(form: str, wide: int, inputs: int, outputs: int) -> str:
    """Whether results are within their rounding, nothing else is written, and bits depend on a token's own inputs alone."""
    worst = 0.0
    for tokens in ODD:
        torch.manual_seed(tokens)
        x, weight, bias = made(tokens, inputs, outputs)
        guarded = torch.full((tokens + 64, outputs), 7.0, dtype=x.dtype, device="cuda")
        out = guarded[:tokens]
        launch_form(form, wide, x, weight, bias, out)
        sums = F.linear(x.double(), weight.double(), bias.double())
        exact = 0.5 * sums * torch.special.erfc(sums * -(0.5**0.5))
        bound = exact.abs() * 2.0**-8 * 1.22 + sums.abs() * 2.0**-8 * 1.13 * (form in ROUNDED) + 4e-5
        worst = max(worst, float(((out.double() - exact).abs() / bound).max()))
        first = out.clone()
        for _ in range(20):
            launch_form(form, wide, x, weight, bias, out)
            if not torch.equal(first, out):
                return "WRONG: bits move from run to run"
        if not bool((guarded[tokens:] == 7.0).all()):
            return "WRONG: written beyond the end"
        some = torch.empty_like(out[-5:])
        launch_form(form, wide, x[-5:].contiguous(), weight, bias, some)
        if not torch.equal(some, first[-5:]):
            return "WRONG: bits depend on the other tokens"
    return (
        f"right, {worst:.2f} of what rounding allows" if worst <= 1.0 else f"WRONG: {worst:.2f} of what rounding allows"
    )


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


def time_shape(inputs: int, outputs: int, right: dict[tuple[str, int], str], seconds: float) -> list[dict[str, Any]]:
    """Every form that is right, twice in turn: the better of both."""
    found = []
    for tokens in TOKENS:
        x, weight, bias = made(tokens, inputs, outputs)
        out = torch.empty(tokens, outputs, dtype=x.dtype, device="cuda")
        calls: dict[str, Callable[[], Any]] = {
            "cuBLAS alone": partial(F.linear, x, weight, bias),
            "cuBLAS, gelu": lambda x=x, w=weight, b=bias: gelu(F.linear(x, w, b)),
        }
        for (form, wide), said in right.items():
            if said.startswith("right"):
                calls[f"{form} {wide}"] = partial(launch_form, form, wide, x, weight, bias, out)
        calls[f"the op, {tile_width(tokens, outputs, num_sms(x.device))}"] = partial(wide_gelu, x, weight, bias, False)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(2):
            for name, call in calls.items():
                times[name].append((time_calls([call]), hot(call, seconds)))
        work = 2.0 * tokens * inputs * outputs
        for name, each in times.items():
            short, warm = (min(pair) for pair in zip(*each, strict=True))
            rates = f"{work / short / 1e6:6.0f} {work / warm / 1e6:6.0f} TFLOP/s"
            say(f"{tokens:6d} x {inputs} x {outputs}  {name:16s} {short:8.1f} short {warm:8.1f} hot us  {rates}")
            found.append(
                {"tokens": tokens, "inputs": inputs, "outputs": outputs, "form": name, "short": short, "hot": warm}
            )
    return found


def run_shape(inputs: int, outputs: int, seconds: float) -> None:
    """A process of its own: says that it is ready, waits for a line, and ends with one of JSON."""
    right = {}
    for form, wide in FORMS:
        try:
            right[form, wide] = check(form, wide, inputs, outputs)
        except Exception as error:
            right[form, wide] = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        say(f"check {inputs} x {outputs} {form} {wide}: {right[form, wide]}")
    say("ready")
    sys.stdin.readline()
    found = time_shape(inputs, outputs, right, seconds)
    checks = [
        {"inputs": inputs, "outputs": outputs, "form": f"{f} {w}", "check": text} for (f, w), text in right.items()
    ]
    say("json " + json.dumps(checks + found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=2, type=int, help="only this one, in this process")
    parser.add_argument("--seconds", type=float, default=0.06, help="of each of two long measurements")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.shape:
        with torch.inference_mode():
            run_shape(*options.shape, options.seconds)
        return 0
    command = [sys.executable, __file__, "--seconds", str(options.seconds), "--shape"]
    workers = [
        subprocess.Popen([*command, *map(str, shape)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for shape in SHAPES
    ]
    for worker in workers:  # nobody is timed while another one checks
        for line in iter(worker.stdout.readline, "ready\n"):
            if not line:
                break
            say(line.rstrip())
    found = []
    for worker in workers:
        said, _ = worker.communicate("go\n")
        for line in said.splitlines():
            if line.startswith("json "):
                found += json.loads(line.removeprefix("json "))
            else:
                say(line)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(worker.returncode == 0 for worker in workers) else 1


if __name__ == "__main__":
    sys.exit(main())
