"""Chooses the tiles of a decode step's fused linear layers on one card, beside ``F.linear`` and separate kernels.

    python bench/ops/linear.py [--rows 1 8] [--model qwen3-0.6b] [--budget 60] [--jobs 14] [--chain]

Kernels that start early (``kernels.triton_early``) cannot be judged alone: a tile is timed inside whole decoder layers with
attention, 28 (or 8) of them in one CUDA graph, so that no weight is in the L2 cache. Each tile is first compared with the
op's reference. The search goes over the layers in turn, from the table's tiles on, until a round brings nothing; the output
layer is timed alone. The lines printed last are the winners, as the table of ``kernels/skinny_linear/tiles.py`` wants them.
--chain only times whole layers, with the table's tiles. Compilation is most of the work, so --jobs processes fill Triton's
cache first.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import torch
import torch.nn.functional as F
from limits import BYTES_PER_US
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.decode_attention import decode_attention
from headway.kernels.rms_norm import add_rms_norm, rms_norm
from headway.kernels.silu_mul import silu_mul
from headway.kernels.skinny_linear.tiles import Kind, Tile, row_bucket, tile_for
from headway.kernels.skinny_linear.triton import ADD, SILU, STORE, launch
from headway.kernels.testing import make_cos_sin, make_paged_inputs
from headway.kernels.triton_early import launch_early

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
    """Tiles worth trying: those whose weights fit into registers, whole or in part."""
    pair = 2 if layer.mode == SILU else 1
    inputs = layer.inputs
    if rows <= 4:
        for wide, block_k, warps in product((2, 4, 8, 16), (512, 1024, 2048), (1, 2, 4, 8, 16)):
            passes = cdiv(inputs, block_k)
            threads = 32 * warps
            if wide < pair or block_k > inputs or wide * block_k > 64 * threads or wide * block_k < 8 * threads:
                continue
            if block_k < 1024 and passes > 2:
                continue
            for held in sorted({passes, min(passes, 4)}):
                if 24 <= wide * held * block_k / threads <= 160:
                    yield Tile(wide // pair, block_k, 0, warps, 1 if held == passes else 3, held)
    if rows > 1:
        for wide, block_k, splits, warps in product((8, 16, 32), (64, 128, 256), (2, 4, 8), (2, 4, 8)):
            step = splits * block_k
            passes = cdiv(inputs, step)
            if warps < splits or wide < pair or not 128 <= step <= min(inputs, 1024):
                continue
            for held, stages in {(0, 4), (0, 3), (1, 3), (2, 3), (passes, 1)}:
                threads = 32 * warps
                weights, activations = wide * held * step / threads, row_bucket(rows) * held * step / threads
                whole = held >= passes
                if rows <= 4 and not whole:
                    continue
                if held > passes or (whole and stages > 1) or weights > 128 or activations > 96:
                    continue
                if (held and not weights >= 16) or (not held and (step > 512 or warps > 4 or inputs < 4096)):
                    continue
                if not whole and held and (step < 512 or wide < 16):
                    continue
                yield Tile(wide // pair, block_k, splits, warps, stages, held)


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

    def __init__(
        self, model: str, rows: int, count: int, tiles: Tiles, context: int = 448, cached: torch.dtype | None = None
    ) -> None:
        self.tiles = dict(tiles)
        shapes = {layer.name: (layer.outputs, layer.inputs) for layer in MODELS[model]}
        hidden, self.heads = shapes["qkv"][1], shapes["o"][1] // 128
        kv_heads = (shapes["qkv"][0] // 128 - self.heads) // 2
        self.names = ("qkv", "o", "gate_up", "down")
        self.weights = [{name: random(*shapes[name]) * 0.02 for name in self.names} for _ in range(count)]
        self.norm, self.residual = random(hidden), random(rows, hidden)
        self.qk_norm = random(128) if model.startswith("qwen3") else None
        self.inputs = make_paged_inputs(
            [(1, context)] * rows, num_decode_rows=rows, heads=(self.heads, kv_heads), size=128, block_size=16,
            dtype=torch.bfloat16, device="cuda", bound=4096, on_device=True, heads_first=True, cached=cached,
        )  # fmt: skip
        first = (self.inputs.k_cache, self.inputs.v_cache)
        others = [
            tuple(torch.randn_like(cache, dtype=torch.bfloat16).to(cache.dtype) for cache in first)
            for _ in range(count - 1)
        ]
        self.caches = cycle([first, *others])  # one a layer: a cache that all share would stay in the L2
        self.positions = torch.full((rows,), context - 1, dtype=torch.int32, device="cuda")
        self.kv_slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.table = make_cos_sin(4096, 128, "cuda")

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        norm, (keys, values) = self.qk_norm, next(self.caches)
        more = (self.positions, self.table, norm, norm, EPS, self.kv_slots, keys, values, self.heads)
        tables, numbers = self.inputs.arguments(128**-0.5)[3:8], (128**-0.5, 0, 0.0)
        return decode_attention(qkv, *more, *tables, *numbers, self.inputs.max_seq_len_bound).flatten(1)

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


def layers_in_chain(model: str) -> int:
    return 28 if model.startswith("qwen3") else 8


def descend(model: str, rows: int, until: float) -> Tiles:
    """The fastest tiles found for ``rows``, by layer; prints each layer's best and worst."""
    made = Chain(model, rows, layers_in_chain(model), {})
    count = len(made.weights)

    def spent() -> float:
        return time_calls([partial(made.fused, True)], 1, replays=3) / count

    best = spent()
    say(f"\n{model} M={rows}: {best:.2f} us a layer with the table's tiles")
    before = float("inf")
    while best < before - 0.02:
        before = best
        for layer in MODELS[model][:4]:
            key = (row_bucket(rows), layer.outputs, layer.inputs)
            kept = made.tiles.get(key)
            found: list[tuple[float, Tile]] = []
            x, norm, weight = random(rows, layer.inputs), random(layer.inputs), made.weights[0][layer.name]
            for tile in candidates(layer, rows):
                if time.monotonic() > until:
                    say("out of time")
                    return made.tiles
                try:
                    check(layer, x, norm, weight, tile)
                    made.tiles[key] = tile
                    found.append((spent(), tile))
                except Exception as error:  # too much shared memory, for one
                    say(f"    {tile}: {type(error).__name__} {' '.join(str(error).split())[:80]}")
            found.sort(key=lambda pair: pair[0])
            if found and found[0][0] < best - 0.02:
                best, kept = found[0]
            if kept is None:
                made.tiles.pop(key, None)
            else:
                made.tiles[key] = kept
            listed = " | ".join(f"{us:.2f} {shown(tile)}" for us, tile in [*found[:3], *found[-1:]])
            say(f"  {layer.name:8s} -> {best:.2f}: {listed}")
    return made.tiles


def head(model: str, rows: int) -> Tiles:
    """The output layer's fastest tile, timed alone: it streams far more than a cache holds."""
    layer = MODELS[model][4]
    weight = random(layer.outputs, layer.inputs) * 0.05
    x, out = random(rows, layer.inputs), torch.zeros(rows, layer.outputs, dtype=torch.bfloat16, device="cuda")
    plain = time_calls([partial(F.linear, x, weight)])
    found: list[tuple[float, Tile]] = []
    for tile in candidates(layer, rows):
        with contextlib.suppress(Exception):
            check(layer, x, x[0], weight, tile)
            found.append((time_calls([partial(launch, x, None, EPS, weight, None, out, STORE, tile)]), tile))
    found.sort(key=lambda pair: pair[0])
    listed = " | ".join(f"{us:.2f} {shown(tile)}" for us, tile in found[:3])
    say(f"  head: floor {2 * weight.numel() / BYTES_PER_US:.1f}, F.linear {plain:.1f}: {listed}")
    return {(row_bucket(rows), layer.outputs, layer.inputs): found[0][1]} if found and found[0][0] < plain else {}


def shown(tile: Tile) -> str:
    """As in the table."""
    t = tile
    return f"Tile({t.block_n}, {t.block_k}, {t.splits}, {t.num_warps}, {t.num_stages}, {t.held})"


def chain(model: str, all_rows: list[int], tiles: Tiles) -> None:
    """Microseconds per layer, with and without attention."""
    count = layers_in_chain(model)
    for rows in all_rows:
        made = Chain(model, rows, count, tiles)
        floor = sum(w.numel() * 2 for w in made.weights[0].values()) / BYTES_PER_US
        for attention in (False, True):
            spent = {"separate": time_calls([partial(made.separate, attention)], 1) / count}
            for early in ("0", "1"):
                os.environ["HEADWAY_EARLY_LAUNCH"] = early
                launch_early.cache_clear()
                spent[f"fused, early {early}"] = time_calls([partial(made.fused, attention)], 1) / count
            figures = "  ".join(f"{name} {us:.2f}" for name, us in spent.items())
            what = "with rope and attention" if attention else "linear layers alone"
            say(f"chain {model} M={rows} {what}: us per layer (weights' floor {floor:.2f}): {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of searching per model")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--chain", action="store_true", help="only time chains of layers, with the table's tiles")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    models = options.model or list(MODELS)
    if not options.chain:
        compile_all(models, options.rows, options.jobs)
    for model in models:
        winners: Tiles = {}
        begin = time.monotonic()
        if not options.chain:
            for i, rows in enumerate(options.rows):
                winners |= descend(model, rows, begin + options.budget * (i + 1) / len(options.rows)) | head(
                    model, rows
                )
            say("\n# winners: (row bucket, N, K)")
            for key, tile in winners.items():
                say(f"    {key}: {shown(tile)},")
        chain(model, options.rows, winners)


if __name__ == "__main__":
    main()
