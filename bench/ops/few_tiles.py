"""Times tiles of products of few rows by themselves, without a norm before them, beside the rule's own tile and other forms.

    python bench/ops/few_tiles.py [--rows 1 8] [--models gemma3-1b ...] [--most 16] [--json FILE]

Models with norms behind their products (Gemma 2 and 3, OLMo 2, GLM-4) run these in decode steps. For each product: microseconds
of the rule's tile, of the best of its candidates, of ``mid_linear`` and of ``F.linear``; weights together are larger than the
L2 cache, kernels start early. ``x`` is over the time of the bytes. The rule was fitted to all of these at 1 and 8 rows, so
its figures here say how well it fits, not how well it does on other shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import read_bytes_per_us, time_calls

from headway.core.ints import cdiv
from headway.kernels.linear_forms.card import card_of
from headway.kernels.mid_linear import mid_gate_up, mid_linear
from headway.kernels.skinny_linear import rule
from headway.kernels.skinny_linear.tile import Kind, Tile
from headway.kernels.skinny_linear.tiles import tile_for
from headway.kernels.skinny_linear.triton import SILU, STORE, launch

MODELS = {  # hidden, inner, query heads, KV heads, size of a head
    "gemma3-1b": (1152, 6912, 4, 1, 256), "gemma3-4b": (2560, 10240, 8, 4, 256), "olmo2-1b": (2048, 8192, 16, 16, 128),
    "gemma2-2b": (2304, 9216, 8, 4, 256), "glm4-9b": (4096, 13696, 32, 2, 128), "gemma2-9b": (3584, 14336, 16, 8, 256),
}  # fmt: skip
CACHE_BYTES = 150 << 20


def products(model: str) -> dict[str, tuple[Kind, int, int]]:
    """Name -> kind, N (gate and up rows both), K."""
    hidden, inner, heads, kv_heads, size = MODELS[model]
    return {
        "qkv": ("skinny_linear", (heads + 2 * kv_heads) * size, hidden), "o": ("skinny_linear", hidden, heads * size),
        "gate_up": ("gate_up", 2 * inner, hidden), "down": ("skinny_linear", hidden, inner),
    }  # fmt: skip


def run(kind: Kind, tile: Tile, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gated = kind == "gate_up"
    out = torch.empty(len(x), len(weight) // (2 if gated else 1), dtype=x.dtype, device=x.device)
    launch(x, None, 0.0, weight, None, out, SILU if gated else STORE, tile)
    return out


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.05


def compile_tile(work: tuple[Kind, Tile, int, int, int]) -> None:
    """Fill Triton's cache."""
    kind, tile, rows, outputs, inputs = work
    run(kind, tile, half(rows, inputs), half(outputs, inputs))


def tried(kind: Kind, rows: int, outputs: int, inputs: int, most: int) -> list[Tile]:
    """The rule's tile, and those that it thinks best; of each way to split a program the first."""
    own = tile_for(kind, rows, outputs, inputs)
    found: dict[tuple[Any, ...], Tile] = {}
    for _, tile in rule.ranked(kind, rows, outputs, inputs, card_of(torch.device("cuda", 0))):
        found.setdefault((tile.block_n, tile.block_k, tile.splits, tile.num_warps, tile.held > 0), tile)
    return list(dict.fromkeys([own, *list(found.values())[: most - 1]]))


def main() -> None:
    """Print a line for each product and number of rows, and its best tiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    cases = [
        (model, name, rows, *each)
        for model in chosen.models
        for name, each in products(model).items()
        for rows in chosen.rows
    ]
    work = [
        (kind, tile, rows, n, k) for _, _, rows, kind, n, k in cases for tile in tried(kind, rows, n, k, chosen.most)
    ]
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_tile, work, chunksize=4))
    rate, kept = read_bytes_per_us(), []
    for model, name, rows, kind, outputs, inputs in cases:
        weights = [half(outputs, inputs) for _ in range(max(2, cdiv(CACHE_BYTES, 2 * outputs * inputs)))]
        x, floor = half(rows, inputs), 2 * outputs * inputs / rate
        expected = run(kind, tile_for(kind, rows, outputs, inputs), x, weights[0]).float()
        timed = []
        for tile in tried(kind, rows, outputs, inputs, chosen.most):
            error = (run(kind, tile, x, weights[0]).float() - expected).abs().max() / expected.abs().max()
            us = time_calls([partial(run, kind, tile, x, weight) for weight in weights])
            timed.append((us if float(error) < 0.02 else float("inf"), tile))
        own, best = timed[0][0], min(us for us, _ in timed)
        middle = mid_gate_up if kind == "gate_up" else mid_linear
        mid = time_calls([partial(middle, x, weight, None, None, 0.0) for weight in weights])
        plain = time_calls([partial(F.linear, x, weight) for weight in weights])
        line = f"{model:10s} {name:8s} {rows:3d} rows [{outputs}, {inputs}]: rule {own:6.2f} ({own / floor:.2f} x)"
        line += f"  best {best:6.2f} ({best / floor:.2f} x)  mid {mid:6.2f}  F.linear {plain:6.2f}"
        sys.stdout.write(f"{line}\n")
        for us, tile in sorted(timed, key=lambda each: each[0])[:4]:
            sys.stdout.write(f"      {us:6.2f} {tile}\n")
        sys.stdout.flush()
        kept.append({"model": model, "product": name, "rows": rows, "kind": kind, "outputs": outputs, "inputs": inputs,
                     "floor_us": floor, "mid_us": mid, "plain_us": plain, "own": repr(timed[0][1]),
                     "tiles": [[us, repr(tile)] for us, tile in timed]})  # fmt: skip
        if chosen.json:
            chosen.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
