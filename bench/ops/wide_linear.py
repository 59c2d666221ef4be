"""The layers' two wide products for many tokens, with what follows them: cuBLAS and a second kernel against one kernel.

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

from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.testing import make_cos_sin
from headway.kernels.wide_linear.hopper.launch import launch_gate_up, wide_add, wide_qkv

SHAPES = {"qwen3-0.6b": (3072, 1024), "llama-8b": (14336, 4096)}
"""(outputs, inputs)."""
HEADS = {"qwen3-0.6b": (16, 8, True), "llama-8b": (32, 8, False)}
"""(query heads, KV heads, whether heads have norms)."""
PRODUCTS = ["gate_up", "qkv", "out", "down"]
EPS, BLOCK_SIZE, CONTEXT = 1e-6, 16, 1024
ODD = [(1, 128, 64), (63, 8, 64), (129, 136, 192), (1000, 3072, 1024), (257, 1000, 320), (8192, 3072, 1024)]
GROUPS = (8, 16)


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
        launch_gate_up(x, weight, out)
        torch.cuda.synchronize()
        expected = silu_mul.reference(F.linear(x, weight)).float()
        error = float((out.float() - expected).abs().max() / expected.abs().max())
        first = out.clone()
        same = True
        for _ in range(20):
            launch_gate_up(x, weight, out)
            same = same and torch.equal(first, out)
        kept = bool((guarded[tokens:] == 7.0).all())
        say(
            f"check {tokens} x {outputs} x {size}: error {error:.4f} of the largest, same bits {same}, beyond kept {kept}"
        )
        if not (error < 0.02 and same and kept):
            raise ValueError("wrong")


class Projection:
    """The projection of queries, keys and values of some tokens; the cache has its heads first, as on CUDA."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, size: int, normed: bool) -> None:
        self.x = torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda")
        width = (heads + 2 * kv_heads) * 128
        self.weight = torch.randn(width, size, dtype=torch.bfloat16, device="cuda") * size**-0.5
        self.positions = (torch.arange(tokens, device="cuda") % CONTEXT).int()
        self.table = make_cos_sin(CONTEXT, 128, "cuda")
        norms = torch.rand(2, 128, device="cuda").to(torch.bfloat16) + 0.5
        self.norms = list(norms) if normed else [None, None]
        self.slots = torch.randperm(tokens + 5 * BLOCK_SIZE, device="cuda")[:tokens].int()
        if tokens > 5:
            self.slots[3], self.slots[5] = -1, 1 << 30
        blocks = tokens // BLOCK_SIZE + 8
        caches = torch.zeros(2, blocks, kv_heads, BLOCK_SIZE, 128, dtype=torch.bfloat16, device="cuda")
        self.caches = list(caches.transpose(2, 3))
        self.heads = heads

    def rest(self) -> list[Any]:
        return [self.positions, self.table, *self.norms, EPS, self.slots, *self.caches, self.heads]

    def fused(self) -> torch.Tensor:
        return wide_qkv(self.x, self.weight, *self.rest())

    def separate(self) -> torch.Tensor:
        return rope_kv_write(F.linear(self.x, self.weight), *self.rest())

    def product(self) -> torch.Tensor:
        return F.linear(self.x, self.weight)


class Sum:
    """A product that is added to the residual, and the norm of that."""

    def __init__(self, tokens: int, outputs: int, size: int) -> None:
        self.x = torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda")
        self.weight = torch.randn(outputs, size, dtype=torch.bfloat16, device="cuda") * size**-0.5
        self.residual = torch.randn(tokens, outputs, dtype=torch.bfloat16, device="cuda")
        self.norm = torch.ones(outputs, dtype=torch.bfloat16, device="cuda")

    def fused(self) -> torch.Tensor:
        wide_add(self.x, self.weight, self.residual)
        return rms_norm(self.residual, self.norm, EPS)

    def separate(self) -> torch.Tensor:
        return add_rms_norm(F.linear(self.x, self.weight), self.residual, self.norm, EPS)

    def product(self) -> torch.Tensor:
        return F.linear(self.x, self.weight)


def check_sum() -> None:
    """As ``check``."""
    for tokens, outputs, size in ((1, 8, 64), (300, 264, 320), (8192, 1024, 2048), (1000, 4096, 14336)):
        case = Sum(tokens, outputs, size)
        before = case.residual.clone()
        expected = [case.separate(), case.residual.clone()]
        runs = []
        for _ in range(20):
            case.residual.copy_(before)
            runs.append([case.fused(), case.residual.clone()])
        found = runs[0]
        same = all(torch.equal(a, b) for run in runs for a, b in zip(run, found, strict=True))
        errors = [
            float((a.float() - b.float()).abs().max() / b.float().abs().max())
            for a, b in zip(found, expected, strict=True)
        ]
        say(f"check {tokens} x {outputs} x {size} added: errors {errors}, same bits {same}")
        if not (max(errors) < 0.02 and same):
            raise ValueError("wrong")


def check_projection() -> None:
    """As ``check``; keys and values too."""
    for tokens, heads, kv_heads, size, normed in (
        (1, 2, 2, 64, True), (100, 4, 2, 192, False), (1000, 16, 8, 1024, True), (8192, 16, 8, 1024, True),
        (777, 32, 8, 4096, False),
    ):  # fmt: skip
        case = Projection(tokens, heads, kv_heads, size, normed)
        expected = [case.separate(), *(cache.clone() for cache in case.caches)]
        for cache in case.caches:
            cache.zero_()
        found = [case.fused(), *(cache.clone() for cache in case.caches)]
        errors = [
            float((a.float() - b.float()).abs().max() / b.float().abs().max())
            for a, b in zip(found, expected, strict=True)
        ]
        same = all(torch.equal(case.fused(), found[0]) for _ in range(20))
        same = same and all(torch.equal(a, b) for a, b in zip(case.caches, found[1:], strict=True))
        say(f"check {tokens} tokens, {heads} + 2 x {kv_heads} heads of {size}: errors {errors}, same bits {same}")
        if not (max(errors) < 0.02 and same):
            raise ValueError("wrong")


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


def cases(name: str, tokens: int) -> dict[str, tuple[float, dict[str, Callable[[], Any]]]]:
    """Product -> (floating-point operations, ways to compute it)."""
    outputs, size = SHAPES[name]
    x, weight = inputs(tokens, outputs, size)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device="cuda")
    gate_up: dict[str, Callable[[], Any]] = {
        "product alone": partial(F.linear, x, weight), "product, then silu": partial(separate, x, weight),
    }  # fmt: skip
    gate_up |= {f"one kernel, groups of {group}": partial(launch_gate_up, x, weight, out, group) for group in GROUPS}
    heads, kv_heads, normed = HEADS[name]
    case = Projection(tokens, heads, kv_heads, size, normed)
    qkv = {"product alone": case.product, "product, then rope": case.separate, "one kernel": case.fused}
    found = {"gate_up": (4.0 * tokens * outputs * size, gate_up), "qkv": (2.0 * tokens * size * len(case.weight), qkv)}
    for product, inner in (("out", heads * 128), ("down", outputs)):
        sums = Sum(tokens, size, inner)
        ways = {
            "product alone": sums.product,
            "product, then add and norm": sums.separate,
            "one kernel, then norm": sums.fused,
        }
        found[product] = (2.0 * tokens * size * inner, ways)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--unchecked", action="store_true", help="it was just checked")
    parser.add_argument("--only", nargs="+", choices=PRODUCTS, default=PRODUCTS)
    parser.add_argument("--sustained", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    right = []
    for product, checked in zip(PRODUCTS, (check, check_projection, check_sum, check_sum), strict=True):
        try:
            if product in options.only:
                if not options.unchecked:
                    checked()
                right.append(product)
        except Exception as error:
            say(f"{product} FAILED {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    found = []
    for name in options.models:
        for tokens in options.tokens:
            for product, (work, calls) in cases(name, tokens).items():
                for label, call in calls.items() if product in right else ():
                    call()
                    figures = {"short": time_calls([call], least=10)}
                    if options.sustained:
                        figures["sustained"] = sustained(call, options.sustained)
                    times = ", ".join(
                        f"{way} {us:9.1f} us {work / us / 1e6:6.1f} TFLOP/s" for way, us in figures.items()
                    )
                    say(f"{name:11s} {tokens:6d} {product:8s} {label:26s} {times}")
                    found.append({"model": name, "tokens": tokens, "product": product, "what": label, **figures})
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
