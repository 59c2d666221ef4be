"""Times a layer's routing and experts against the bytes of the distinct experts and the arithmetic, by number of tokens.

    python bench/ops/experts.py [--shape qwen3-30b-a3b gpt-oss-20b] [--tokens 1 8 64 256 4096] [--plain]

Routers are random, so that tokens spread; the experts that were read are counted. Several layers' weights are in one CUDA
graph, so none of them is found in the L2 cache. Bytes are those over the bandwidth that a reduction has in the same run.
``--plain`` adds a column: the same without the kernels in Gluon.

    python bench/ops/experts.py --many [--json FILE]

Sorting and the products of many pairs, each by itself, for four shapes: in plain Triton, one row of tiles after the other, and
as they are chosen.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from timing import read_bytes_per_us, time_calls

from headway.kernels.expert_mlp import expert_mlp, tiles
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


def time_many(shape: Shape, tokens: int) -> dict[str, float]:
    """us of each product and of sorting. ``equal``: whether the chosen products out are the bits of plain ones."""
    from headway.kernels.expert_mlp.hopper.launch import many_out
    from headway.kernels.expert_mlp.triton import grouped_plain, sort_pairs
    from headway.kernels.triton_early import launch_early

    layer, early = Layer(shape), launch_early(torch.device("cuda"))
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    ids, weights = layer.route(x, torch.zeros(tokens, device="cuda", dtype=torch.int32))
    order, counts = sort_pairs(ids, shape.experts)
    pairs = ids.numel()
    between, found = (torch.empty(pairs, size, device="cuda", dtype=x.dtype) for size in (shape.inner, shape.hidden))
    plan = torch.empty(1 + tiles.tile_count(pairs, shape.experts, tiles.MANY_ROWS), 4, device="cuda", dtype=torch.int32)
    sizes = {"E": shape.experts, "TOP_K": shape.top_k, "WEIGH": False, "FP4": False}
    into = {"ACT": "silu", "GATED": True}

    def plain(first: bool) -> None:
        source, target, matrix = (x, between, layer.ins) if first else (between, found, layer.outs)
        given = (source, order, counts, weights, matrix, target, plan if first else None)
        grouped_plain(*given, (0.0, 0.0), first, sizes, into, early)

    out = partial(many_out, between, order, plan, layer.outs, found, early)
    times = {"sort": time_calls([partial(sort_pairs, ids, shape.experts)])}
    with patch.object(tiles, "MANY_GROUP", 1):
        times |= {"in, row by row": time_calls([partial(plain, True)], least=10, replays=4)}
    times |= {"in": time_calls([partial(plain, True)], least=10, replays=4)}
    times |= {"out, plain": time_calls([partial(plain, False)], least=10, replays=4)}
    wanted = found.clone()
    times |= {"out": time_calls([out], least=10, replays=4)}
    print("  ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
    return {**times, "equal": torch.equal(found, wanted)}


def run_many(path: Path | None) -> None:
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name in ("qwen3-30b-a3b", "deepseek-v2-lite", "olmoe", "mixtral"):
        for tokens in (2048, 8192):
            print(f"{name}, {tokens} tokens, us: ", end="")
            result[f"{name} {tokens}"] = time_many(SHAPES[name], tokens)
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES)[:2], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 256, 1024, 8192])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.many:
        run_many(options.json)
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
