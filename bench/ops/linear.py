"""Times the linear layers of a decode step on one card: every tile, both models' shapes, beside ``F.linear``.

    python bench/ops/linear.py [--rows 1 8] [--model qwen3-0.6b] [--budget 60] [--jobs 14] [--chain | --sweep]

Each tile is first compared with the op's reference, then timed in a CUDA graph that walks over enough different weights
that the L2 cache does not hold them. Floor: bytes of weight over 4.44 TB/s. The last lines are the winners, as the table of
``headway/kernels/skinny_linear/tiles.py`` wants them. Then whole layers with those tiles: six kernels a layer, 28 layers in one
graph, fused wherever there is an op (models fuse only where the table says), beside the separate kernels of the models.
--chain does that alone, with the table's tiles; --sweep leaves it out.
Compilation is most of the work, so --jobs processes fill Triton's cache first.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from timing import time_calls

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.paged_attention import paged_attention
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import silu_mul
from headway.kernels.skinny_linear.tiles import Kind, Tile, row_bucket, tile_for
from headway.kernels.skinny_linear.triton import ADD, SILU, STORE, launch
from headway.kernels.testing import make_cos_sin, make_paged_inputs

BYTES_PER_US = 4.44e6
COLD_BYTES = 200 * 2**20
"""Weights of one shape together: more than three times the L2."""
EPS = 1e-6
Tiles = dict[tuple[int, int, int], Tile]


@dataclass(frozen=True)
class Layer:
    """One linear layer: name, N and K of its weight, what is fused around it."""

    name: str
    outputs: int
    inputs: int
    norm: bool
    mode: int


MODELS = {
    "qwen3-0.6b": [
        Layer("gate_up", 6144, 1024, True, SILU), Layer("qkv", 4096, 1024, True, STORE),
        Layer("o", 1024, 2048, False, ADD), Layer("down", 1024, 3072, False, ADD),
        Layer("head", 151936, 1024, False, STORE),
    ],
    "llama-8b": [
        Layer("gate_up", 28672, 4096, True, SILU), Layer("qkv", 6144, 4096, True, STORE),
        Layer("o", 4096, 4096, False, ADD), Layer("down", 4096, 14336, False, ADD),
        Layer("head", 128256, 4096, False, STORE),
    ],
}  # fmt: skip


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def kind_of(norm: bool, mode: int) -> Kind:
    if mode == ADD:
        return "linear_add"
    return "norm_gate_up" if mode == SILU else "norm_linear" if norm else "skinny_linear"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def candidates(layer: Layer, rows: int) -> Iterator[Tile]:
    """Tiles worth trying: 16 to 48 KB of weight per program, with and without tensor cores."""
    pair = 2 if layer.mode == SILU else 1
    largest = next_power_of_2(layer.inputs)
    if rows <= 4:
        for wide, block_k, warps, stages in [
            (8, 1024, 4, 1), (4, 1024, 4, 1), (4, 2048, 4, 1), (8, 512, 2, 1), (4, 1024, 2, 1), (16, 512, 4, 1),
            (16, 256, 4, 1), (2, 2048, 4, 1), (8, 2048, 8, 1), (4, 512, 4, 3), (8, 512, 4, 3), (8, 512, 4, 4),
            (16, 256, 4, 4), (4, 1024, 4, 3),
        ]:  # fmt: skip
            fits = block_k <= largest and wide >= pair and (stages == 1 or 2 * block_k <= layer.inputs)
            if fits and wide * block_k * row_bucket(rows) <= 32768:
                yield Tile(wide // pair, block_k, 0, warps, stages)
    for wide, block_k, splits, warps, stages in [
        (8, 128, 4, 4, 3), (8, 64, 4, 4, 4), (8, 128, 8, 8, 2), (8, 64, 8, 8, 4), (16, 64, 4, 4, 4), (16, 128, 4, 4, 3),
        (32, 64, 4, 4, 3), (16, 64, 8, 8, 3), (16, 256, 4, 4, 1), (8, 256, 4, 4, 1), (32, 64, 2, 2, 4), (64, 64, 2, 4, 3),
    ]:  # fmt: skip
        if splits * block_k <= largest and max(16, rows) * splits * block_k <= 32768:
            yield Tile(wide // pair, block_k, splits, warps, stages)


def check(layer: Layer, x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, tile: Tile) -> None:
    """Raises when the kernel is wrong. Reference: the separate ops."""
    y = F.linear(rms_norm(x, norm, EPS) if layer.norm else x, weight)
    wide = layer.outputs // (2 if layer.mode == SILU else 1)
    out = random(x.shape[0], wide)
    expected = {SILU: lambda: silu_mul(y), ADD: lambda: out + y, STORE: lambda: y}[layer.mode]()
    launch(x, norm if layer.norm else None, EPS, weight, None, out, layer.mode, tile)
    error, largest = (out.float() - expected.float()).abs().max(), expected.float().abs().max()
    if not bool(error <= 0.02 * largest):
        raise ValueError(f"error {float(error):.3g} at values up to {float(largest):.3g}")


def sweep(model: str, all_rows: list[int], budget: float) -> Tiles:
    """Print every tile's time; returns the winners."""
    winners: Tiles = {}
    layers = MODELS[model]
    per_layer = budget / len(layers)
    for layer in layers:
        stop = time.monotonic() + per_layer
        size = 2 * layer.outputs * layer.inputs
        floor = size / BYTES_PER_US
        weights = [random(layer.outputs, layer.inputs) * 0.05 for _ in range(max(2, cdiv(COLD_BYTES, size)))]
        norm = random(layer.inputs)
        wide = layer.outputs // (2 if layer.mode == SILU else 1)
        say(f"\n{model} {layer.name} N={layer.outputs} K={layer.inputs}: floor {floor:.2f} us")
        for rows in all_rows:
            x, out = random(rows, layer.inputs), torch.zeros(rows, wide, dtype=torch.bfloat16, device="cuda")
            plain = time_calls([partial(F.linear, x, weight) for weight in weights])
            found: list[tuple[float, Tile]] = []
            wrong = []
            for tile in candidates(layer, rows):
                if time.monotonic() > stop and found:
                    wrong.append("out of time")
                    break
                try:
                    check(layer, x, norm, weights[0], tile)
                    rest = (None, out, layer.mode, tile)
                    given = norm if layer.norm else None
                    found.append((time_calls([partial(launch, x, given, EPS, w, *rest) for w in weights]), tile))
                except Exception as error:  # too much shared memory, for one
                    wrong.append(f"{tile}: {type(error).__name__} {' '.join(str(error).split())[:80]}")
            found.sort(key=lambda pair: pair[0])
            best = " | ".join(
                f"{spent:.2f} (n{t.block_n} k{t.block_k} s{t.splits} w{t.num_warps} st{t.num_stages})"
                for spent, t in found[:4]
            )
            ratio = found[0][0] / floor if found else 0.0
            say(f"  M={rows:3d}  F.linear {plain:7.2f}  fused best x{ratio:.2f}: {best}")
            for line in wrong:
                say(f"        {line}")
            if found and rows <= 16:
                winners.setdefault((row_bucket(rows), layer.outputs, layer.inputs), found[0][1])
    return winners


def compile_tiles(model: str, index: int, rows: int) -> None:
    """Fill Triton's cache with one layer's tiles."""
    layer = MODELS[model][index]
    weight = torch.empty(layer.outputs, layer.inputs, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(rows, layer.outputs // (2 if layer.mode == SILU else 1), dtype=torch.bfloat16, device="cuda")
    x, norm = random(rows, layer.inputs), random(layer.inputs)
    for tile in candidates(layer, rows):
        with contextlib.suppress(Exception):  # the sweep reports it
            launch(x, norm if layer.norm else None, EPS, weight, None, out, layer.mode, tile)
    torch.cuda.synchronize()


def compile_all(models: list[str], all_rows: list[int], jobs: int) -> None:
    begin = time.monotonic()
    buckets = sorted({row_bucket(rows): rows for rows in all_rows}.values())
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [pool.submit(compile_tiles, m, i, r) for m in models for i in range(len(MODELS[m])) for r in buckets]
        for done in work:
            if done.exception():
                say(f"compiling: {done.exception()}")
    say(f"compiled in {time.monotonic() - begin:.0f} s")


class Chain:
    """All layers of a decode step with caches, run with fused or separate ops."""

    def __init__(self, model: str, rows: int, count: int, tiles: Tiles, context: int = 256) -> None:
        self.tiles = tiles
        shapes = {layer.name: (layer.outputs, layer.inputs) for layer in MODELS[model]}
        hidden, self.heads = shapes["qkv"][1], shapes["o"][1] // 128
        kv_heads = (shapes["qkv"][0] // 128 - self.heads) // 2
        self.names = ("qkv", "o", "gate_up", "down")
        self.weights = [{name: random(*shapes[name]) * 0.02 for name in self.names} for _ in range(count)]
        self.norm, self.residual = random(hidden), random(rows, hidden)
        self.qk_norm = random(128) if model.startswith("qwen3") else None
        self.inputs = make_paged_inputs(
            [(1, context)] * rows, num_decode_rows=rows, heads=(self.heads, kv_heads), size=128, block_size=16,
            dtype=torch.bfloat16, device="cuda", bound=4096, on_device=True,
        )  # fmt: skip
        self.positions = torch.full((rows,), context - 1, dtype=torch.int32, device="cuda")
        self.kv_slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.table = make_cos_sin(4096, 128, "cuda")

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        i, norm = self.inputs, self.qk_norm
        q = rope_kv_write(
            qkv, self.positions, self.table, norm, norm, EPS, self.kv_slots, i.k_cache, i.v_cache, self.heads
        )
        return paged_attention(q, *i.arguments(128**-0.5)[1:]).flatten(1)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, norm: bool, mode: int) -> torch.Tensor:
        out = self.residual
        if mode != ADD:
            out = torch.empty(x.shape[0], weight.shape[0] // (2 if mode == SILU else 1), dtype=x.dtype, device=x.device)
        key = (row_bucket(x.shape[0]), *weight.shape)
        tile = self.tiles.get(key) or tile_for(kind_of(norm, mode), x.shape[0], *weight.shape)
        launch(x, self.norm if norm else None, EPS, weight, None, out, mode, tile)
        return out

    def fused(self, attention: bool) -> None:
        for weights in self.weights:
            qkv = self.linear(self.residual, weights["qkv"], True, STORE)
            attended = self.attend(qkv) if attention else qkv[:, : weights["o"].shape[1]]
            self.linear(attended, weights["o"], False, ADD)
            inner = self.linear(self.residual, weights["gate_up"], True, SILU)
            self.linear(inner, weights["down"], False, ADD)

    def separate(self, attention: bool) -> None:
        x = rms_norm(self.residual, self.norm, EPS)
        for weights in self.weights:
            qkv = F.linear(x, weights["qkv"])
            attended = self.attend(qkv) if attention else qkv[:, : weights["o"].shape[1]]
            x = add_rms_norm(F.linear(attended, weights["o"]), self.residual, self.norm, EPS)
            inner = silu_mul(F.linear(x, weights["gate_up"]))
            x = add_rms_norm(F.linear(inner, weights["down"]), self.residual, self.norm, EPS)


def chain(model: str, all_rows: list[int], tiles: Tiles) -> None:
    """Microseconds per layer, with and without attention."""
    count = 28 if model.startswith("qwen3") else 8
    for rows in all_rows:
        if rows > 16:
            continue
        made = Chain(model, rows, count, tiles)
        floor = sum(w.numel() * 2 for w in made.weights[0].values()) / BYTES_PER_US
        for attention in (False, True):
            spent = {
                "separate": time_calls([partial(made.separate, attention)], 1) / count,
                "fused": time_calls([partial(made.fused, attention)], 1) / count,
            }
            figures = "  ".join(f"{name} {us:.2f}" for name, us in spent.items())
            what = "with rope and attention" if attention else "linear layers alone"
            say(f"chain {model} M={rows} {what}: us per layer (weights' floor {floor:.2f}): {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of sweeping per model")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--chain", action="store_true", help="only time chains of layers, with the table's tiles")
    parser.add_argument("--sweep", action="store_true", help="only sweep tiles")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    models = options.model or list(MODELS)
    if not options.chain:
        compile_all(models, options.rows, options.jobs)
    for model in models:
        winners: Tiles = {}
        if not options.chain:
            winners = sweep(model, options.rows, options.budget)
            say("\n# winners")
            for key, t in winners.items():
                say(f"    {key}: Tile({t.block_n}, {t.block_k}, {t.splits}, {t.num_warps}, {t.num_stages}),")
        if not options.sweep:
            chain(model, options.rows, winners)


if __name__ == "__main__":
    main()
