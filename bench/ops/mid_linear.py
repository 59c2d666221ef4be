"""Chooses the tiles of the linear layers for 17 to 128 rows on one Hopper card, beside ``F.linear`` and separate kernels.

    python bench/ops/mid_linear.py [--rows 64 32] [--chains 24 32 48 64] [--budget 60] [--jobs 14]

As in ``linear.py``: a tile is first compared with the reference, then timed inside whole decoder layers with attention, 28 of
them in one CUDA graph. The search goes over the layers in turn; a second turn takes only what was good in the first. Then
each op is put back to ``F.linear`` and its separate kernels where that is faster. The lines printed last are the winners, as
the table of ``headway/kernels/mid_linear/tiles.py`` wants them, and layers of the winners at other numbers of rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from linear import EPS, MODELS, Chain, Layer, layers_in_chain, random, say
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.mid_linear.launch import launch
from headway.kernels.mid_linear.tiles import Kind, MidTile, row_block, row_bucket, tile_for
from headway.kernels.rms_norm import add_parts_rms_norm, add_rms_norm, rms_norm
from headway.kernels.silu_mul import silu_mul
from headway.kernels.triton_early import launch_early

KINDS: dict[str, Kind] = {
    "qkv": "mid_linear", "o": "linear_parts", "gate_up": "mid_gate_up", "down": "linear_parts",
}  # fmt: skip
MODEL = "qwen3-0.6b"
LAYERS = {layer.name: layer for layer in MODELS[MODEL][:4]}
ORDER = ("gate_up", "qkv", "down", "o")
Choice = dict[str, MidTile | None]
"""Layer -> its tile, None for ``F.linear`` and separate kernels."""


def candidates(layer: Layer, rows: int) -> Iterator[MidTile]:
    """Tiles that occupy most processors once or twice, with some or all of their copies in flight."""
    kind, inputs = KINDS[layer.name], layer.inputs
    parts = kind == "linear_parts"
    for wide, block_k, splits, warps in product((16, 32, 64, 128), (64, 128), (1, 2, 3, 4, 6, 8), (4, 8)):
        if inputs % (block_k * splits) or (splits > 1) is not parts or (wide == 16 and rows > 32):
            continue
        chunks = inputs // (block_k * splits)
        programs = cdiv(layer.outputs, wide) * splits
        if not (60 if wide >= 64 else 90) <= programs <= 264 or chunks > 32:
            continue
        in_flight = (2, 4) if block_k == 128 else (4, 8) if parts else (3, 5, 8)
        for x_ahead in [*(ahead for ahead in in_flight if ahead < chunks - 1), chunks]:
            for w_ahead in {chunks, max(x_ahead, chunks // 2)}:
                whole = w_ahead == chunks
                if (warps == 8 and (not whole or block_k == 128)) or (parts and not whole and x_ahead != 4):
                    continue
                tile = MidTile(wide, block_k, splits, w_ahead, x_ahead, warps)
                if tile.fits(rows, inputs) and (inputs <= 3072 or (block_k == 128 and x_ahead < chunks)):
                    yield tile


def make_out(layer: Layer, tile: MidTile, rows: int) -> torch.Tensor:
    kind = KINDS[layer.name]
    if kind == "linear_parts":
        return torch.empty(tile.splits, rows, layer.outputs, dtype=torch.float32, device="cuda")
    wide = layer.outputs // (2 if kind == "mid_gate_up" else 1)
    return torch.empty(rows, wide, dtype=torch.bfloat16, device="cuda")


def run(layer: Layer, x: torch.Tensor, weight: torch.Tensor, tile: MidTile) -> torch.Tensor:
    out = make_out(layer, tile, x.shape[0])
    launch(x, weight, None, out, tile, silu=KINDS[layer.name] == "mid_gate_up")
    return out


def check(layer: Layer, x: torch.Tensor, weight: torch.Tensor, tile: MidTile) -> None:
    """Raises when the kernel is wrong, or not the same twice. Reference: the separate ops."""
    expected = F.linear(x, weight)
    if KINDS[layer.name] == "mid_gate_up":
        expected = silu_mul(expected)
    found = run(layer, x, weight, tile)
    if not torch.equal(found, run(layer, x, weight, tile)):
        raise ValueError("two runs differ")
    y = found.sum(0) if found.dim() == 3 else found
    error, largest = (y.float() - expected.float()).abs().max(), expected.float().abs().max()
    if not bool(error <= 0.02 * largest):
        raise ValueError(f"error {float(error):.3g} at values up to {float(largest):.3g}")


def compile_tiles(name: str, rows: int, part: int, parts: int) -> None:
    """Fill Triton's cache with some of one layer's tiles."""
    layer = LAYERS[name]
    weight = torch.zeros(layer.outputs, layer.inputs, dtype=torch.bfloat16, device="cuda")
    x = random(rows, layer.inputs)
    for i, tile in enumerate(candidates(layer, rows)):
        if i % parts == part:
            with contextlib.suppress(Exception):  # the sweep reports it
                run(layer, x, weight, tile)
    torch.cuda.synchronize()


def compile_all(all_rows: list[int], jobs: int) -> None:
    begin = time.monotonic()
    blocks = {row_block(rows): rows for rows in sorted(all_rows, reverse=True)}.values()  # fewer rows have more tiles
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [
            pool.submit(compile_tiles, name, rows, part, 8) for name, rows, part in product(ORDER, blocks, range(8))
        ]
        for done in work:
            if done.exception():
                say(f"compiling: {done.exception()}")
    say(f"compiled in {time.monotonic() - begin:.0f} s")


class MidChain(Chain):
    """The layers of ``Chain`` with linear layers that start early, or those of them that have a tile."""

    def __init__(self, rows: int) -> None:
        super().__init__(MODEL, rows, layers_in_chain(MODEL), {})
        self.choice: Choice = {}
        for name, layer in LAYERS.items():
            self.choice[name] = tile_for(KINDS[name], rows, layer.outputs, layer.inputs)

    def product(self, name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tile = self.choice[name]
        if tile is not None:
            return run(LAYERS[name], x, weight, tile)
        y = F.linear(x, weight)
        return silu_mul(y) if name == "gate_up" else y

    def add(self, parts: torch.Tensor) -> torch.Tensor:
        adding = add_parts_rms_norm if parts.dim() == 3 else add_rms_norm
        y: torch.Tensor = adding(parts, self.residual, self.norm, EPS)
        return y

    def early(self) -> None:
        x = rms_norm(self.residual, self.norm, EPS)
        for weights in self.weights:
            attended = self.attend(self.product("qkv", x, weights["qkv"]))
            x = self.add(self.product("o", attended, weights["o"]))
            inner = self.product("gate_up", x, weights["gate_up"])
            x = self.add(self.product("down", inner, weights["down"]))

    def spent(self, replays: int = 3) -> float:
        """Microseconds per layer."""
        return time_calls([self.early], 1, replays=replays) / len(self.weights)

    def spent_separate(self) -> float:
        return time_calls([partial(self.separate, True)], 1) / len(self.weights)


def descend(rows: int, until: float) -> Choice:
    """The fastest tiles found for ``rows``; prints each layer's best and worst."""
    made = MidChain(rows)
    separate, best = made.spent_separate(), made.spent()
    say(f"\nM={rows}: separate {separate:.2f}, with default tiles {best:.2f} us a layer")
    good: dict[str, list[MidTile]] = {}
    for again in (False, True):
        for name in ORDER:
            layer, kept = LAYERS[name], made.choice[name]
            found: list[tuple[float, MidTile]] = []
            x, weight = random(rows, layer.inputs), made.weights[0][name]
            for tile in good[name] if again else candidates(layer, rows):
                if time.monotonic() > until:
                    say("out of time")
                    break
                try:
                    check(layer, x, weight, tile)
                    made.choice[name] = tile
                    found.append((made.spent(), tile))
                except Exception as error:
                    say(f"    {name} {tile}: {type(error).__name__} {' '.join(str(error).split())[:90]}")
            found.sort(key=lambda pair: pair[0])
            if found and found[0][0] < best - 0.02:
                best, kept = found[0]
            made.choice[name] = kept
            good[name] = [tile for _, tile in found[:8]]
            listed = " | ".join(f"{us:.2f} {shown(tile)}" for us, tile in [*found[:4], *found[-1:]])
            say(f"  {name:8s} -> {best:.2f} of {len(found)}: {listed}")
    for name in ORDER:
        kept = made.choice[name]
        made.choice[name] = None
        without = made.spent()
        say(f"  {name:8s} by F.linear: {without:.2f}")
        if without < best:
            best = without
        else:
            made.choice[name] = kept
    return made.choice


def shown(tile: MidTile) -> str:
    """As in the table."""
    t = tile
    return f"MidTile({t.wide}, {t.block_k}, {t.splits}, {t.w_ahead}, {t.x_ahead}, {t.num_warps})"


def chain(rows: int, choice: Choice) -> dict[str, float]:
    """Microseconds per layer: separate kernels, and ``choice`` with and without early launch."""
    made = MidChain(rows)
    made.choice = dict(choice)
    spent = {"separate": made.spent_separate()}
    for early in ("0", "1"):
        os.environ["HEADWAY_EARLY_LAUNCH"] = early
        launch_early.cache_clear()
        spent[f"mid, early {early}"] = made.spent(replays=5)
    figures = "  ".join(f"{name} {us:.2f}" for name, us in spent.items())
    say(f"chain M={rows} with rope and attention: us per layer: {figures}")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 32], help="numbers of rows to choose tiles for")
    parser.add_argument(
        "--chains", type=int, nargs="*", default=[24, 32, 48, 64], help="numbers of rows to time at last"
    )
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of searching")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path, help="write figures and winners there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    compile_all(options.rows, options.jobs)
    begin = time.monotonic()
    chosen: dict[int, Choice] = {}
    for i, rows in enumerate(options.rows):
        chosen[row_bucket(rows)] = descend(rows, begin + options.budget * (i + 1) / len(options.rows))
    say("\n# winners: (op, N, K): row bucket: tile")
    for name, layer in LAYERS.items():
        found = {bucket: choice[name] for bucket, choice in sorted(chosen.items())}
        tiles = ", ".join(f"{bucket}: {shown(tile)}" for bucket, tile in found.items() if tile)
        say(f'    ("{KINDS[name]}", {layer.outputs}, {layer.inputs}): {{{tiles}}},')
    spent = {rows: chain(rows, chosen[row_bucket(rows)]) for rows in options.chains if row_bucket(rows) in chosen}
    winners = {b: {n: shown(t) if t else None for n, t in choice.items()} for b, choice in chosen.items()}
    if options.json:
        options.json.write_text(json.dumps({"us_per_layer": spent, "tiles": winners}, indent=1))


if __name__ == "__main__":
    main()
