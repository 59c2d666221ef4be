"""Times a layer's routing and experts against the bytes of the distinct experts and the arithmetic, by number of tokens.

    python bench/ops/experts.py [--shape qwen3-30b-a3b gpt-oss-20b] [--tokens 1 8 64 256 4096] [--plain]

Routers are random, so that tokens spread; the experts that were read are counted. Several layers' weights are in one CUDA
graph, so none of them is found in the L2 cache. Bytes are those over the bandwidth that a reduction has in the same run.
``--plain`` adds a column: the same without the kernels in Gluon.

    python bench/ops/experts.py --many check|compile|time [--shape ...] [--tokens 2048 8192] [--json FILE]

The products of many pairs, each by itself: against the reference where outputs are poisoned and routing is odd; compiled, so
that several processes share that work; timed in plain Triton and in Gluon with several tiles, beside sorting and adding up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from timing import read_bytes_per_us, time_calls

from headway.kernels.expert_mlp import expert_mlp, tiles
from headway.kernels.expert_mlp.tiles import ManyTile
from headway.kernels.route_experts import route_experts

FLOPS_PER_US = 780e6


@dataclass(frozen=True)
class Shape:
    """E experts of which K are chosen, hidden size C, inner width I."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    fp4: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, fp4=True),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "olmoe": Shape(64, 8, 2048, 1024),
    "mixtral": Shape(8, 2, 4096, 14336),
    "qwen3-next": Shape(512, 10, 2048, 512),
}


class Layer:
    """Random weights of one layer."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        count, hidden, inner = shape.experts, shape.hidden, shape.inner
        self.router = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
        self.ins, self.outs = self._matrix(2 * inner, hidden), self._matrix(hidden, inner)

    def _matrix(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        count = self.shape.experts
        if not self.shape.fp4:
            weight = torch.empty(count, rows, columns, device="cuda", dtype=torch.bfloat16).normal_(0, columns**-0.5)
            return weight, None, None
        packed = torch.randint(0, 256, (count, rows, columns // 2), device="cuda", dtype=torch.uint8)
        scales = torch.full((count, rows, columns // 32), 120, device="cuda", dtype=torch.uint8)
        bias = torch.zeros(count, rows, device="cuda", dtype=torch.bfloat16)
        return packed, bias, scales

    def route(self, x: torch.Tensor, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route_experts(x, self.router, None, None, live, self.shape.top_k, "softmax", True, 1.0, 1, 1, 1, 0.0, 0)

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        act = "clamped_swiglu" if self.shape.fp4 else "silu"
        return expert_mlp(x, ids, weights, *self.ins, *self.outs, act, True, 7.0, 1.702, False)


SILU: dict[str, Any] = {"ACT": "silu", "GATED": True}
IN_TILES = [ManyTile(256, 4, group) for group in (16, 4, 8, 32)] + [ManyTile(256, 3, 16), ManyTile(128, 6, 16)]
OUT_TILES = [ManyTile(256, 3, group) for group in (16, 4, 8, 32)] + [ManyTile(128, 6, 16), ManyTile(128, 5, 16)]


class Products:
    """One layer's products for so many tokens, with all that they read and write."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        from headway.kernels.expert_mlp.triton import sort_pairs
        from headway.kernels.triton_early import launch_early

        shape = layer.shape
        self.layer, self.early = layer, launch_early(torch.device("cuda"))
        self.x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.ids, self.weights = layer.route(self.x, torch.zeros(tokens, device="cuda", dtype=torch.int32))
        self.order, self.counts, self.plan = sort_pairs(self.ids, shape.experts, planned=True)
        pairs = self.ids.numel()
        self.between = torch.full((pairs, shape.inner), torch.nan, device="cuda", dtype=torch.bfloat16)
        self.found = torch.full((pairs, shape.hidden), torch.nan, device="cuda", dtype=torch.bfloat16)

    def parts(self, first: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if first:
            return self.x, self.between, self.layer.ins
        return self.between, self.found, self.layer.outs

    def plain(self, first: bool) -> None:
        from headway.kernels.expert_mlp.triton import grouped_plain

        source, target, (weight, bias, scales) = self.parts(first)
        sizes = {"E": self.layer.shape.experts, "TOP_K": self.layer.shape.top_k, "WEIGH": False, "FP4": False}
        grouped_plain(
            source, self.order, self.counts, self.weights, (weight, scales, bias), target, (0.0, 0.0), first, sizes, SILU,
            self.early,
        )  # fmt: skip

    def gluon(self, first: bool, tile: ManyTile | None = None) -> None:
        from headway.kernels.expert_mlp.hopper.launch import grouped_many

        source, target, (weight, bias, scales) = self.parts(first)
        assert self.plan is not None
        grouped_many(
            source, self.order, self.plan, (weight, scales, bias), target, self.layer.shape.top_k, (0.0, 0.0), first, SILU,
            self.early, tile,
        )  # fmt: skip

    def both(self) -> torch.Tensor:
        return self.layer.run(self.x, self.ids, self.weights)

    def in_plain(self) -> torch.Tensor:
        with (
            patch("headway.kernels.expert_mlp.triton.in_large_tiles", return_value=False),
            patch("headway.kernels.expert_mlp.triton.SORTED_AT_ONCE", 2**30),
        ):
            return self.both()

    def sort(self, at_once: bool) -> None:
        from headway.kernels.expert_mlp.triton import sort_pairs

        with patch("headway.kernels.expert_mlp.triton.SORTED_AT_ONCE", 2**30 if at_once else 0):
            sort_pairs(self.ids, self.layer.shape.experts, planned=not at_once)

    def differences(self) -> dict[str, float]:
        """Largest differences of Gluon's results to plain ones, over the largest of these; NaN where something is missing."""
        found = {}
        for first, candidates in ((True, IN_TILES), (False, OUT_TILES)):
            target = self.parts(first)[1]
            target.fill_(torch.nan)
            self.plain(first)
            wanted = target.float()
            for tile in candidates:
                target.fill_(torch.nan)
                self.gluon(first, tile)
                error = (target.float() - wanted).abs().max() / wanted.abs().max()
                once = target.clone()
                for _ in range(3):
                    self.gluon(first, tile)
                    error += 0.0 if torch.equal(once, target) else torch.inf  # a moving result would be a race
                found[f"{'in' if first else 'out'} {astuple(tile)}"] = float(error)
        return found


def time_many(shape: Shape, tokens: int) -> dict[str, Any]:
    work = Products(Layer(shape), tokens)
    differences = work.differences()
    flops = 2.0 * tokens * shape.top_k * shape.hidden * shape.inner
    calls: dict[str, tuple[Callable[[], Any], float]] = {}
    for first, candidates in ((True, IN_TILES), (False, OUT_TILES)):
        name, work_done = ("in", 2 * flops) if first else ("out", flops)
        calls[f"{name} plain"] = partial(work.plain, first), work_done
        for tile in candidates:
            calls[f"{name} {astuple(tile)}"] = partial(work.gluon, first, tile), work_done
    calls |= {"sort at once": (partial(work.sort, True), 0.0), "sort in segments": (partial(work.sort, False), 0.0)}
    calls |= {"whole plain": (work.in_plain, 3 * flops), "whole": (work.both, 3 * flops)}
    times = {}
    for name, (call, done) in calls.items():
        us = time_calls([call], least=10, replays=4)
        times[name] = {"us": round(us, 1), "tflops": round(done / us / 1e6, 1)}
        print(f"  {name:20} {us:9.1f} us {done / us / 1e6:7.1f} TFLOP/s", flush=True)
    fullness = float(work.counts.sum() / (work.counts + 63).div(64, rounding_mode="floor").mul(64).sum())
    return {"fullness": fullness, "differences": differences, "times": times}


ODD = [
    # dtype, T, E, hidden, inner, K, bias, act, gated
    (torch.bfloat16, 150, 1, 64, 8, 1, True, "silu", True),
    (torch.bfloat16, 1000, 13, 320, 136, 3, True, "clamped_swiglu", True),
    (torch.float16, 900, 9, 192, 264, 2, True, "relu2", False),
    (torch.bfloat16, 4000, 16, 1024, 768, 4, False, "silu", True),
]
ROUTINGS = ("random", "empty experts", "one expert", "few tokens", "none")


def routed(kind: str, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """ids [T, K], of which some are none of these experts."""
    ids = torch.rand(tokens, experts + 2, device="cuda").argsort(1)[:, :top_k].int() - 1
    if kind == "empty experts":
        ids = torch.where(ids % 3 == 1, -1, ids)
    elif kind == "one expert":
        ids = torch.full_like(ids, -1)
        ids[:, -1] = experts - 1
    elif kind == "few tokens":
        ids[7:] = experts
    elif kind == "none":
        ids = torch.full_like(ids, -1)
    return ids


def check_many() -> list[dict[str, Any]]:
    """Each odd case, its largest error, and whether a second run and a run without the others' pairs gave the same bits."""
    found = []
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype, tokens, experts, hidden, inner, top_k, biased, act, gated in ODD:

        def make(*shape: int, fan: int = 1, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").mul(fan**-0.5).to(dtype)

        outputs = 2 * inner if gated else inner
        biases = [make(experts, size) if biased else None for size in (outputs, hidden)]
        into = make(experts, outputs, hidden, fan=hidden), biases[0], None
        out = make(experts, hidden, inner, fan=inner), biases[1], None
        given = (torch.rand(tokens, top_k, device="cuda"), *into, *out, act, gated, 1.5, 1.7, False)
        x, half = make(tokens, hidden), tokens // 2
        for kind in ROUTINGS:
            ids = routed(kind, tokens, experts, top_k)
            others = ids.clone()
            others[half:] = -1
            with patch.object(tiles, "MANY_PAIRS", 0):
                y, again, apart = (expert_mlp(x, each, *given).float() for each in (ids, ids, others))
            wanted = expert_mlp.reference(x, ids, *given).float()
            error = float((y - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
            same = torch.equal(y, again) and torch.equal(y[:half], apart[:half]) and not bool(apart[half:].any())
            good = same and error < (0.02 if dtype == torch.bfloat16 else 0.004)
            case = f"{dtype} T={tokens} E={experts} C={hidden} I={inner} K={top_k} {act} {kind}"
            found.append({"case": case, "error": error, "same": same, "good": good})
            print("good" if good else "WRONG", found[-1], flush=True)
    return found


def run_many(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    if options.many == "check":
        result["checks"] = check_many()
        print("all good" if all(each["good"] for each in result["checks"]) else "SOMETHING IS WRONG")
    for name in options.shape if options.many != "check" else ():
        for tokens in options.tokens:
            if options.many == "compile":
                work = Products(Layer(SHAPES[name]), tokens)
                work.differences()
                for call in (work.both, work.in_plain):
                    call()
                torch.cuda.synchronize()
                break
            print(f"{name}, {tokens} tokens", flush=True)
            result[f"{name} {tokens}"] = time_many(SHAPES[name], tokens)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES)[:2], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 256, 1024, 8192])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--many", choices=("check", "compile", "time"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.many:
        run_many(options)
        return
    speed = read_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}: reads {speed / 1e6:.2f} TB/s")
    for name in options.shape:
        shape = SHAPES[name]
        layers = [Layer(shape) for _ in range(3)]
        size = 3 * shape.hidden * shape.inner * (0.5 + 1 / 32 if shape.fp4 else 2.0)
        print(f"{name}: us a layer\ntokens  experts read  route  experts  floor (bytes or arithmetic)  x floor  plain")
        for tokens in options.tokens:
            x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
            live = torch.zeros(tokens, device="cuda", dtype=torch.int32)
            chosen = [layer.route(x, live) for layer in layers]
            read = sum(ids.unique().numel() for ids, _ in chosen) / len(chosen)
            routing = time_calls([partial(layer.route, x, live) for layer in layers])
            calls = [partial(layer.run, x, *own) for layer, own in zip(layers, chosen, strict=True)]
            experts = time_calls(calls)
            flops = 6.0 * tokens * shape.top_k * shape.hidden * shape.inner
            floor = max(read * size / speed, flops / FLOPS_PER_US)
            beside = ""
            if options.plain and shape.fp4:
                with patch("headway.kernels.expert_mlp.triton.runs_gluon", return_value=False):
                    beside = f"{time_calls(calls):8.1f}"
            ratio = (routing + experts) / floor
            print(
                f"{tokens:6} {read:13.1f} {routing:6.1f} {experts:8.1f} {floor:8.1f} {ratio:10.2f} {beside}", flush=True
            )


if __name__ == "__main__":
    main()
