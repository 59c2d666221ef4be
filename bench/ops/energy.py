"""What reading and multiplying cost in energy: at its power limit a card gives as many steps a second as it has joules for.

    python bench/ops/energy.py [--rows 256 8192] [--seconds 2.5] [--json FILE]                  on a GPU

Each case runs for seconds, so that the card is as hot as in service; the driver's energy counter, good to a few percent, is
read behind the first half second and at the end. Cases: PyTorch's reduction over the keys and values of 256 rows of 448 tokens
(a layer of Qwen3-0.6B or of Llama-3.1-8B: 8 KV heads of 128), of random and of zero bits; decode attention over the same; a
layer's four products by ``F.linear``, with as many layers' weights as a step has, so that none stays in the L2 cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from layers import MODELS, Layers, layers_of, random, say

from headway.kernels.linear_forms.shapes import JUNCTIONS

ROWS, CONTEXT = 256, 448
COLD = 0.5
"""Seconds before the counter is read."""


class Counter:
    """Joules that the first card has taken since its driver was loaded (NVML)."""

    def __init__(self) -> None:
        self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._check(self._nvml.nvmlInit_v2())
        self._check(self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)))

    def read(self) -> float:
        found = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(found)))
        return found.value / 1e3

    def _check(self, status: int) -> None:
        if status:
            raise SystemExit(f"NVML says {status}: this driver has no energy counter")


def spent(calls: list[Callable[[], Any]], counter: Counter, seconds: float) -> tuple[float, float]:
    """(microseconds, millijoules) a call, hot."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = (0.0, 0.0)
    for part in (COLD, seconds):
        torch.cuda.synchronize()
        joules, begin, count = counter.read(), time.monotonic(), 0
        while time.monotonic() - begin < part:
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            count += 10 * len(calls)
        found = (time.monotonic() - begin) * 1e6 / count, (counter.read() - joules) * 1e3 / count
    return found


def reading() -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """The largest word of a layer's keys and values."""
    words = ROWS * CONTEXT * 8 * 128
    for name, make in (("random", torch.randn), ("zero", torch.zeros)):
        layers = [make(2 * words, dtype=torch.bfloat16, device="cuda").view(torch.int32) for _ in range(8)]
        yield (
            f"reduction of {4 * words / 1e6:.0f} MB, {name} bits",
            [lambda x=x: x.amax() for x in layers],  # type: ignore[misc]
        )


def attention(model: str) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """Decode attention of 256 rows, each layer with a cache of its own."""
    made = Layers(model, ROWS, 8, CONTEXT)
    qkv = random(ROWS, MODELS[model].weight("qkv")[0])
    yield f"{model}: decode attention, {ROWS} rows of {CONTEXT}", [lambda: made.attend(qkv)] * 8


def products(model: str, rows: int) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """The four products of a layer, each alone; a call is one of them."""
    count = layers_of(model) if rows <= ROWS else 2
    for name in JUNCTIONS:
        outputs, inputs = MODELS[model].weight(name)
        weights = [random(outputs, inputs) * 0.02 for _ in range(count)]
        x = random(rows, inputs)
        yield (
            f"{model}: {name} by F.linear, {rows} rows",
            [lambda x=x, weight=weight: F.linear(x, weight) for weight in weights],  # type: ignore[misc]
        )


def main() -> None:
    """Print and write every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 8192], help="of the products")
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    counter, found = Counter(), {}
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    sources = [reading(), *(attention(model) for model in MODELS)]
    sources += [products(model, rows) for model in MODELS for rows in options.rows]
    for source in sources:
        for name, calls in source:
            us, millijoules = spent(calls, counter, options.seconds)
            found[name] = {"us": round(us, 2), "mj": round(millijoules, 2), "watts": round(1e3 * millijoules / us)}
            say(f"{name}: {us:.1f} us, {millijoules:.2f} mJ, {1e3 * millijoules / us:.0f} W")
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
