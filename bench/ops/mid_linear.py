"""Chooses the tiles of the linear layers for 3 to 256 rows on one Hopper card, beside ``F.linear`` and separate kernels.

    python bench/ops/mid_linear.py [--rows 64 32] [--chains 24 32 48 64] [--budget 60] [--jobs 14]
    python bench/ops/mid_linear.py --rows 256 192 128 --chains 96 128 160 192 224 256
    python bench/ops/mid_linear.py --model llama-8b --rows 64 32 128 256 --chains 24 32 64 128 256

As in ``linear.py``: a tile is first compared with the reference, then timed inside whole decoder layers with attention, 28 of
them in one CUDA graph. The search goes over the layers in turn; a second turn takes only what was good in the first. --way says
what sums the parts of K: a norm (``linear_parts``), or a cluster that leaves no norm between two layers (``mid_add``). With the
former each op is then put back to ``F.linear`` and its separate kernels where that is faster. The lines printed last are the
winners, as the table of ``headway/kernels/mid_linear/tiles.py`` wants them, and layers of the winners at other numbers of rows,
up to 16 beside the fused layers of ``skinny_linear``: tiles for up to 16 rows belong into the table only where they beat those.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from linear import EPS, MODELS, Chain, Layer, layers_in_chain, random, say
from mid_tiles import WAYS, candidates, shown
from timing import time_calls

from headway.kernels.mid_linear import reference
from headway.kernels.mid_linear.launch import launch, launch_add
from headway.kernels.mid_linear.tiles import TABLE, Kind, MidTile, row_bucket, tile_for
from headway.kernels.rms_norm import add_parts_rms_norm, add_rms_norm, rms_norm
from headway.kernels.silu_mul import silu_mul
from headway.kernels.skinny_linear.tiles import MAX_ROWS as FEW_ROWS

ORDER = {"meet": ("o", "down", "gate_up", "qkv"), "parts": ("gate_up", "qkv", "down", "o")}
ODD_ROWS = (3, 8, 17, 64)
Choice = dict[str, MidTile | None]
"""Layer -> its tile, None for ``F.linear`` and separate kernels."""


Sums = tuple[torch.Tensor, torch.Tensor]
"""Activations that no norm has scaled, and the sums of squares that do."""


def run(
    kind: Kind, x: torch.Tensor, weight: torch.Tensor, tile: MidTile, squares: torch.Tensor | None = None
) -> torch.Tensor:
    rows, outputs = x.shape[0], weight.shape[0] // (2 if kind == "mid_gate_up" else 1)
    if kind == "linear_parts":
        out = torch.empty(tile.splits, rows, outputs, dtype=torch.float32, device="cuda")
    else:
        out = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")
    launch(x, weight, None, out, tile, squares, EPS, silu=kind == "mid_gate_up")
    return out


def run_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, tile: MidTile) -> Sums:
    out = torch.empty_like(residual)
    squares = torch.empty(tile.programs(weight.shape[0]), x.shape[0], dtype=torch.float32, device="cuda")
    launch_add(x, weight, None, residual, norm, out, squares, tile)
    return out, squares


def results(
    kind: Kind, x: torch.Tensor, weight: torch.Tensor, tile: MidTile, parts: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the kernel gives, and the reference. ``parts``: of the sums of squares, 0 for none."""
    squares = (torch.rand(parts, x.shape[0], device="cuda") + 0.5) * (x.shape[1] / parts) if parts else None
    if kind == "mid_add":
        residual, norm = random(x.shape[0], weight.shape[0]), random(weight.shape[0])
        found, expected = residual.clone(), residual + F.linear(x, weight)
        y, sums = run_add(x, weight, found, norm, tile)
        wanted = torch.stack([columns.float().square().sum(1) for columns in expected.split(tile.wide, dim=1)])
        return [found, y, sums], [expected, expected * norm, wanted]
    if kind == "linear_parts":
        return [run(kind, x, weight, tile).sum(0)], [F.linear(x, weight)]
    meaning = reference.mid_gate_up if kind == "mid_gate_up" else reference.mid_linear
    return [run(kind, x, weight, tile, squares)], [meaning(x, weight, None, squares, EPS)]


def check(kind: Kind, x: torch.Tensor, weight: torch.Tensor, tile: MidTile, parts: int = 0) -> None:
    """Raises when the kernel is wrong, or not the same twice."""
    state = torch.cuda.get_rng_state()
    found, wanted = results(kind, x, weight, tile, parts)
    torch.cuda.set_rng_state(state)
    again, _ = results(kind, x, weight, tile, parts)
    for one, other, expected in zip(found, again, wanted, strict=True):
        if not torch.equal(one, other):
            raise ValueError("two runs differ")
        error, largest = (one.float() - expected.float()).abs().max(), expected.float().abs().max()
        if not bool(error <= 0.02 * largest):
            raise ValueError(f"error {float(error):.3g} at values up to {float(largest):.3g}")


def part_counts(model: str, name: str, way: str, rows: int) -> list[int]:
    """Parts of the sums of squares that a layer may meet: its inputs over the widths of the tiles before it."""
    if way != "meet" or name not in ("qkv", "gate_up"):
        return [0]
    adding = next(layer for layer in layers_of(model) if layer.name == ("down" if name == "qkv" else "o"))
    return sorted({tile.programs(adding.outputs) for tile in candidates(adding, rows, way)})


def compile_tiles(layer: Layer, kind: Kind, tiles: list[tuple[MidTile, int]]) -> None:
    """Fill Triton's cache with some of one layer's tiles, which are compiled alike for every number of rows."""
    weight = torch.zeros(layer.outputs, layer.inputs, dtype=torch.bfloat16, device="cuda")
    x = random(16, layer.inputs)
    for tile, parts in tiles:
        with contextlib.suppress(Exception):  # the sweep reports it
            results(kind, x, weight, tile, parts)
    torch.cuda.synchronize()


def compile_all(model: str, all_rows: list[int], way: str, jobs: int) -> None:
    begin = time.monotonic()
    work = []
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for layer in layers_of(model):
            pairs = list(
                dict.fromkeys(
                    pair
                    for rows in all_rows
                    for pair in product(candidates(layer, rows, way), part_counts(model, layer.name, way, rows))
                )
            )
            kind = WAYS[way][layer.name]
            work += [pool.submit(compile_tiles, layer, kind, pairs[i : i + 4]) for i in range(0, len(pairs), 4)]
        for done in work:
            if done.exception():
                say(f"compiling: {done.exception()}")
    say(f"compiled in {4 * len(work)} or less in {time.monotonic() - begin:.0f} s")


class MidChain(Chain):
    """The layers of ``Chain`` with linear layers that start early, or those of them that have a tile."""

    def __init__(self, model: str, rows: int, way: str, context: int = 448, cached: torch.dtype | None = None) -> None:
        super().__init__(model, rows, layers_in_chain(model), {}, context, cached)
        self.layers = {layer.name: layer for layer in layers_of(model)}
        self.kinds, self.way = WAYS[way], way
        self.choice = first_tiles(model, rows, way)

    def product(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None = None
    ) -> torch.Tensor:
        tile = self.choice[name]
        if tile is not None:
            return run(self.kinds[name], x, weight, tile, squares)
        y = F.linear(x, weight)
        return silu_mul(y) if name == "gate_up" else y

    def add(self, parts: torch.Tensor) -> torch.Tensor:
        adding = add_parts_rms_norm if parts.dim() == 3 else add_rms_norm
        y: torch.Tensor = adding(parts, self.residual, self.norm, EPS)
        return y

    def early(self) -> None:
        x = rms_norm(self.residual, self.norm, EPS)
        if self.way == "meet":
            self.met(x)
            return
        for weights in self.weights:
            attended = self.attend(self.product("qkv", x, weights["qkv"]))
            x = self.add(self.product("o", attended, weights["o"]))
            inner = self.product("gate_up", x, weights["gate_up"])
            x = self.add(self.product("down", inner, weights["down"]))

    def met(self, x: torch.Tensor) -> None:
        """All layers without a norm between two."""
        squares, out, down = None, self.choice["o"], self.choice["down"]
        assert out is not None and down is not None
        for weights in self.weights:
            attended = self.attend(self.product("qkv", x, weights["qkv"], squares))
            x, squares = run_add(attended, weights["o"], self.residual, self.norm, out)
            inner = self.product("gate_up", x, weights["gate_up"], squares)
            x, squares = run_add(inner, weights["down"], self.residual, self.norm, down)

    def spent(self, replays: int = 3) -> float:
        """Microseconds per layer."""
        return time_calls([self.early], 1, replays=replays) / len(self.weights)

    def spent_separate(self) -> float:
        return time_calls([partial(self.separate, True)], 1) / len(self.weights)

    def spent_fused(self) -> float:
        return time_calls([partial(self.fused, True)], 1) / len(self.weights)


def try_tiles(made: MidChain, name: str, tiles: list[MidTile], until: float) -> list[tuple[float, MidTile]]:
    """Those that are right, with microseconds per layer, the best first."""
    found: list[tuple[float, MidTile]] = []
    weight, before = made.weights[0][name], {"qkv": "down", "gate_up": "o"}.get(name)
    x = random(made.residual.shape[0], weight.shape[1])
    adding = made.choice[before] if made.way == "meet" and before else None
    parts = adding.programs(weight.shape[1]) if adding else 0
    for tile in tiles:
        if time.monotonic() > until:
            say("out of time")
            break
        try:
            check(made.kinds[name], x, weight, tile, parts)
            made.choice[name] = tile
            found.append((made.spent(), tile))
        except Exception as error:
            say(f"    {name} {tile}: {type(error).__name__} {' '.join(str(error).split())[:90]}")
    return sorted(found, key=lambda pair: pair[0])


def descend(model: str, rows: int, way: str, start: Choice, until: float) -> Choice:
    """The fastest tiles found for ``rows``, beginning with ``start``; prints each layer's best and worst."""
    made = MidChain(model, rows, way)
    made.choice |= {name: tile for name, tile in start.items() if tile is not None}
    separate, best = made.spent_separate(), made.spent()
    say(f"\nM={rows}: separate {separate:.2f}, with first tiles {best:.2f} us a layer")
    good: dict[str, list[MidTile]] = {}
    for again in (False, True):
        for name in ORDER[way]:
            kept = made.choice[name]
            tiles = good[name] if again else list(candidates(made.layers[name], rows, way))
            found = try_tiles(made, name, tiles, until)
            if found and found[0][0] < best - 0.02:
                best, kept = found[0]
            made.choice[name] = kept
            good[name] = [tile for _, tile in found[:8]]
            listed = " | ".join(f"{us:.2f} {shown(tile)}" for us, tile in [*found[:6], *found[-1:]])
            say(f"  {name:8s} -> {best:.2f} of {len(found)}: {listed}")
    for name in ORDER[way] if way == "parts" else ():
        kept = made.choice[name]
        made.choice[name] = None
        without = made.spent()
        say(f"  {name:8s} by F.linear: {without:.2f}")
        if without < best:
            best = without
        else:
            made.choice[name] = kept
    listed = "  ".join(f"{name}: {shown(tile) if tile else None}" for name, tile in made.choice.items())
    say(f"M={rows}: separate {separate:.2f}, chosen {best:.2f}: {listed}")
    return made.choice


def check_odd_rows(model: str, way: str, choice: Choice) -> None:
    """Raises when the chosen tiles are wrong at numbers of rows that do not fill them."""
    for layer in layers_of(model):
        tile, weight = choice[layer.name], random(layer.outputs, layer.inputs) * 0.02
        for rows, parts in product(ODD_ROWS, part_counts(model, layer.name, way, 64)):
            if tile is not None:
                check(WAYS[way][layer.name], random(rows, layer.inputs), weight, tile, parts)


def layers_of(model: str) -> list[Layer]:
    """gate_up, qkv, o and down."""
    return MODELS[model][:4]


def first_tiles(model: str, rows: int, way: str) -> Choice:
    return {x.name: tile_for(WAYS[way][x.name], rows, x.outputs, x.inputs) for x in layers_of(model)}


def chain(model: str, rows: int, way: str, choice: Choice) -> dict[str, float]:
    """Microseconds per layer: separate kernels, fused layers of few rows, the table's parts, and ``choice``."""
    spent = {"parts": MidChain(model, rows, "parts").spent(replays=5)}
    made = MidChain(model, rows, way)
    made.choice = dict(choice)
    spent["separate"] = made.spent_separate()
    if rows <= FEW_ROWS:
        spent["fused"] = made.spent_fused()
    spent[way] = made.spent(replays=5)
    figures = "  ".join(f"{name} {us:.2f}" for name, us in spent.items())
    say(f"chain M={rows} with rope and attention: us per layer: {figures}")
    return spent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 32], help="numbers of rows to choose tiles for")
    parser.add_argument(
        "--chains", type=int, nargs="*", default=[24, 32, 48, 64], help="numbers of rows to time at last"
    )
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of searching")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--json", type=Path, help="write figures and winners there")
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-0.6b")
    parser.add_argument("--way", choices=list(WAYS), default="meet", help="how parts of K are summed")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    model, way = options.model, options.way
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    compile_all(model, options.rows, way, options.jobs)
    begin = time.monotonic()
    chosen: dict[int, Choice] = {}
    for i, rows in enumerate(options.rows):
        start = chosen.get(256, {}) if rows > 64 else {} if way == "meet" or rows > 16 else first_tiles(model, 32, way)
        until = begin + options.budget * (i + 1) / len(options.rows)
        chosen[row_bucket(rows)] = choice = descend(model, rows, way, start, until)
        try:
            check_odd_rows(model, way, choice)
            say(f"M={rows}: right at {ODD_ROWS} rows")
        except Exception as error:
            say(f"M={rows}: WRONG: {error}")
    say("\n# winners: (op, N, K): row bucket: tile")
    for layer in layers_of(model):
        name = layer.name
        key = (WAYS[way][name], layer.outputs, layer.inputs)
        found = {**TABLE.get(key, {}), **{bucket: choice[name] for bucket, choice in chosen.items()}}
        tiles = ", ".join(f"{bucket}: {shown(tile)}" for bucket, tile in sorted(found.items()) if tile)
        say(f'    ("{key[0]}", {key[1]}, {key[2]}): {{{tiles}}},')
    spent = {
        rows: chain(model, rows, way, chosen[row_bucket(rows)]) for rows in options.chains if row_bucket(rows) in chosen
    }
    winners = {b: {n: shown(t) if t else None for n, t in choice.items()} for b, choice in chosen.items()}
    if options.json:
        options.json.write_text(json.dumps({"us_per_layer": spent, "tiles": winners}, indent=1))


if __name__ == "__main__":
    main()
