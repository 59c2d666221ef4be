"""Times tiles of decode attention alone, for the shapes of many models, so that a rule can be fitted and judged on one card.

    python -m bench.ops.attention_tiles --out tiles.jsonl [--seconds 180] [--shapes 2x6x128 1x4x256-fp8] [--rows 64 256]

A shape is KV heads x queries of each x head size. Rows are ragged by a fifth to either side, longest first, as the engine has
them; caches lie as ``CachePool`` keeps them, their blocks scattered. Many launches, each of a layer of its own, are in one CUDA
graph, before which the L2 cache is filled with other things. Kernels are compiled by other processes, those of the next shapes
while one is timed.

The file has a line of JSON for the card, then one for each shape, number of rows and length, as soon as it is measured: times
of the rule's tile and of every candidate, what each kernel takes of a processor, and the time of the bytes at the rate that a
plain reduction reads at here. ``short_us``: the rule's tile with a bound that the longest row reaches, so that no program finds
nothing to do. Shapes unlike those that the rule was made of come first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.ops.draft_attention import Case, alike
from bench.ops.timing import read_bytes_per_us, time_calls
from headway.core.ints import cdiv
from headway.kernels.compiler_process import Compiled, CompilerProcess
from headway.kernels.paged_attention.hopper import early_decode
from headway.kernels.paged_attention.hopper.decode_tiles import (
    REGISTERS,
    RESERVED,
    SHARED,
    THREAD_REGISTERS,
    EarlyTile,
    Heads,
    early_tile,
    program_bytes,
)
from headway.kernels.paged_attention.hopper.triton_decode import early_decode_kernel
from headway.kernels.paged_attention.tiles import MAX_SPLITS_WHEN_FULL, choose_splits
from headway.kernels.triton_precompile import NotedKernel, hash_compiler, launches_noted

ROWS = (256, 64, 8, 128, 32, 1, 192)
"""What is asked about most comes first, in case time runs out."""
TOKENS = (300, 1000)
LONG = (8, 4000)
"""Rows and tokens of one case more."""
MIXED = ((256, 430), (64, 430))
"""Rows and tokens of cases whose lengths are spread wide."""
BOUND = 8192
"""Of a row's tokens, as far as the launcher knows: a graph is for contexts of any length."""
RAGGED, WIDE = 0.2, 0.8
"""How far lengths are from their mean, to either side."""
PIECES = (128, 256, 512)
"""Tokens that a row may be cut into, where lengths are spread wide and programs fill the card: long rows into more of them than
short ones, which no tile says."""
PROGRAM_KB = 227
"""Of shared memory, on Hopper."""
LIMIT = 128
COLD_BYTES = 300 << 20
"""What layers read before one is read again, at least."""
FLUSH_BYTES = 256 << 20
GRAPH_US, FEWEST, MOST = 1000, 6, 24
"""What a graph takes, about, and the launches that it has."""
WARPS, STAGES = (1, 2, 4, 8), (1, 2, 3, 4)
RESIDENTS = (0.97, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """KV heads, queries of each, numbers of a head, bytes of a cached number."""

    kv_heads: int
    group: int
    size: int
    itemsize: int = 2

    def __str__(self) -> str:
        return f"{self.kv_heads}x{self.group}x{self.size}" + ("-fp8" if self.itemsize == 1 else "")

    @property
    def cached(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.itemsize == 1 else torch.bfloat16

    @property
    def heads(self) -> Heads:
        return Heads(self.size, self.group, self.itemsize)

    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.size * self.itemsize


SHAPES = [
    Shape(2, 6, 128), Shape(1, 4, 256), Shape(4, 7, 128), Shape(1, 8, 256), Shape(2, 6, 128, 1), Shape(2, 8, 128),
    Shape(4, 2, 256), Shape(2, 4, 64), Shape(4, 8, 64), Shape(1, 4, 256, 1), Shape(8, 4, 64), Shape(8, 4, 128),
    Shape(8, 2, 128), Shape(8, 2, 128, 1),
]  # fmt: skip


def together(tile: EarlyTile, shape: Shape) -> int:
    """Programs that share a processor."""
    registers = min(THREAD_REGISTERS[shape.size], tile.registers or 255)
    by_registers = REGISTERS // (32 * tile.num_warps * registers)
    return min(by_registers, SHARED // (program_bytes(tile, shape.heads) + RESERVED), 32)


def splits_in_use(tile: EarlyTile, shape: Shape, rows: int, tokens: int, sms: int, piece: int = 0) -> tuple[int, int]:
    """(programs that have part of a row of ``tokens`` tokens, tiles of each)."""
    most, least_tiles = choose_splits(rows * shape.kv_heads, BOUND, tile.block_n, sms, tile.residents)
    if piece:
        most, least_tiles = cut(tile, piece)
    tiles = cdiv(tokens, tile.block_n)
    share = cdiv(tiles, max(1, min(cdiv(tiles, least_tiles), most)))
    return cdiv(tiles, share), share


def candidates(shape: Shape, rows: int, tokens: int, sms: int) -> list[EarlyTile]:
    """Each launch once, of those that fit a processor and might win: pieces come in no more than two waves, or
    one with clusters; there are no more stages than tiles; registers are limited where that lets more programs run."""
    found: dict[tuple[int | None, ...], EarlyTile] = {}
    programs = rows * shape.kv_heads
    for warps, stages, residents in product(WARPS, STAGES, RESIDENTS):
        tile = EarlyTile(warps, stages, residents)
        used, share = splits_in_use(tile, shape, rows, tokens, sms)
        clusters = [size for size in (2, 4, 8) if size >= used > size // 2 and used > 1]
        if stages > max(share, 2) or (warps == 1 and used > 1):
            continue
        for cluster, limit in product((1, *clusters), (None, LIMIT)):
            each = replace(tile, cluster=cluster, registers=limit)
            fits = program_bytes(each, shape.heads) <= PROGRAM_KB << 10
            waves = 2 if cluster == 1 else 1
            if not fits or (used > 1 and used * programs > waves * sms * together(each, shape)):
                continue
            if limit and (stages > 2 or shape.size > 128 or not _is_crowded(each, shape, used * programs, sms)):
                continue
            found.setdefault((warps, stages, used, cluster, limit), each)
    return list(found.values())


def _is_crowded(limited: EarlyTile, shape: Shape, programs: int, sms: int) -> bool:
    """Whether ``programs`` would wait for room that a limit on registers makes."""
    free = together(replace(limited, registers=None), shape)
    return programs > sms * free and together(limited, shape) > free


def points(all_rows: Sequence[int]) -> list[tuple[int, int, float]]:
    """(rows, tokens, how ragged these are) to measure."""
    found = [(rows, tokens, WIDE) for rows, tokens in MIXED] + [(*LONG, RAGGED)]
    return [(rows, tokens, RAGGED) for rows in all_rows for tokens in TOKENS] + [
        each for each in found if each[0] in all_rows
    ]


def own_tile(shape: Shape, rows: int, sms: int) -> EarlyTile:
    """The rule's."""
    return early_tile(rows * shape.kv_heads, shape.heads, sms)


def tiles_of(shape: Shape, rows: int, tokens: int, sms: int) -> list[EarlyTile]:
    """The rule's tile and the others."""
    return list(dict.fromkeys([own_tile(shape, rows, sms), *candidates(shape, rows, tokens, sms)]))


def kernels_of(shape: Shape, all_rows: Sequence[int], sms: int) -> list[EarlyTile]:
    """A tile for each kernel that ``shape`` needs: how rows are split makes no other."""
    every = (tile for rows, tokens, _ in points(all_rows) for tile in tiles_of(shape, rows, tokens, sms))
    return list(dict.fromkeys(replace(tile, residents=3.0) for tile in every))


def pieces_of(
    shape: Shape, rows: int, ragged: float, tiles: Sequence[EarlyTile], sms: int
) -> list[tuple[EarlyTile, int]]:
    """Tiles of which rows may be cut into pieces, and tokens of a piece."""
    if ragged < WIDE or rows * shape.kv_heads < sms:
        return []
    kernels = dict.fromkeys(replace(tile, residents=3.0, cluster=1) for tile in tiles if tile.registers is None)
    return [(tile, piece) for tile in kernels for piece in PIECES if tile.stages * tile.block_n <= piece]


def lengths_of(rows: int, tokens: int, ragged: float = RAGGED) -> list[int]:
    """Evenly from ``ragged`` below ``tokens`` to as far above, longest first."""
    step = 2 * ragged / max(rows - 1, 1)
    return [round(tokens * (1 + ragged - step * i)) if rows > 1 else tokens for i in range(rows)]


def cut(tile: EarlyTile, piece: int) -> tuple[int, int]:
    """What ``choose_splits`` would say if rows were cut into pieces of ``piece`` tokens."""
    return MAX_SPLITS_WHEN_FULL, max(1, piece // tile.block_n)


@contextmanager
def using(tile: EarlyTile, piece: int = 0) -> Iterator[None]:
    """The launcher takes ``tile`` as it is, and cuts rows into pieces of ``piece`` tokens unless that is 0."""
    with (
        patch.object(early_decode, "early_tile", lambda *_: tile),
        patch.object(early_decode, "choose_splits", (lambda *_: cut(tile, piece)) if piece else choose_splits),
    ):
        yield


def case_of(shape: Shape, lengths: Sequence[int], layers: int, device: str) -> Case:
    sizes = (shape.kv_heads * shape.group, shape.kv_heads, shape.size, shape.size)
    return Case(sizes, lengths, 1, shape.cached, layers, BOUND, device)


class Ahead:
    """Has kernels compiled by other processes."""

    def __init__(self) -> None:
        self._compiler = CompilerProcess()
        self._asked: dict[Shape, list[tuple[NotedKernel, Future[Compiled]]]] = {}
        hash_compiler()

    def ask(self, shape: Shape, tiles: Sequence[EarlyTile], device: str = "cuda") -> int:
        """Begin with the kernels of ``tiles``; how many there are."""
        case, noted = case_of(shape, [70, 40], 1, device), list[NotedKernel]()
        with launches_noted(noted.append):
            for tile in tiles:
                with using(tile):
                    case.fused(0)
        asked = self._asked[shape] = [(kernel, Future[Compiled]()) for kernel in noted]
        for kernel, answer in asked:
            kernel.settle()
            self._compiler.submit(kernel.job, answer.set_result)
        return len(noted)

    def load(self, shape: Shape) -> list[str]:
        """Wait for a shape's kernels and load them; what went wrong."""
        complaints = []
        for kernel, answer in self._asked.pop(shape):
            complaint = answer.result().complaint
            try:
                kernel.compile()
            except Exception as error:  # more shared memory than there is, for one
                complaint = f"{type(error).__name__}: {error}"
            if complaint:
                complaints.append(" ".join(complaint.split())[:160])
        return complaints

    def close(self) -> None:
        self._compiler.close()


@contextmanager
def last_kernel() -> Iterator[list[Any]]:
    """A list whose only entry is the kernel that was launched last."""
    kept: list[Any] = [None]

    def run(*args: Any, **options: Any) -> Any:
        kept[0] = type(early_decode_kernel).run(early_decode_kernel, *args, **options)
        return kept[0]

    with patch.object(early_decode_kernel, "run", run):
        yield kept


class Bench:
    """Measures one point after the other until its time is over.

    Args:
        rate: bytes that the card reads in a microsecond.
        until: of ``time.monotonic``.
    """

    def __init__(self, sms: int, rate: float, until: float, device: str = "cuda") -> None:
        self.sms, self.rate, self.until, self.device = sms, rate, until, device
        self._other = torch.zeros(FLUSH_BYTES // 4 if device == "cuda" else 1, device=device)

    def measure(self, shape: Shape, rows: int, tokens: int, ragged: float = RAGGED) -> dict[str, Any]:
        """A line of the file; ``cut`` where there was no time for all candidates."""
        lengths = lengths_of(rows, tokens, ragged)
        size = sum(lengths) * shape.token_bytes()
        floor = size / self.rate
        launches = min(MOST, max(FEWEST, cdiv(GRAPH_US, max(1, int(floor)))))
        case = case_of(shape, lengths, min(launches, max(2, cdiv(COLD_BYTES, size))), self.device)
        own, *tiles = tiles_of(shape, rows, tokens, self.sms)
        others = [(tile, 0) for tile in tiles] + pieces_of(shape, rows, ragged, [own, *tiles], self.sms)
        found: list[dict[str, Any]] = []
        with last_kernel() as kernel:
            with using(own):
                expected = case.fused(0)
                own_us, facts = self._time(case, launches), resources(kernel[0])
            found.append(self._entry(shape, rows, tokens, (own, 0), own_us, facts))
            for tile, piece in others:
                if time.monotonic() > self.until:
                    break
                with using(tile, piece):
                    try:
                        alike(case.fused(0), expected)
                        spent, facts = self._time(case, launches), resources(kernel[0])
                    except Exception as error:  # more shared memory than there is, for one
                        say(f"    {tile}: {type(error).__name__} {' '.join(str(error).split())[:120]}")
                        continue
                found.append(self._entry(shape, rows, tokens, (tile, piece), spent, facts))
        with using(own):
            again = self._time(case, launches)
            case.inputs = replace(case.inputs, max_seq_len_bound=lengths[0])
            short = self._time(case, launches)
        point = {
            **asdict(shape),
            "rows": rows,
            "tokens": tokens,
            "ragged": ragged,
            "keys": sum(lengths),
            "floor_us": floor,
        }
        return {**point, "own_us": own_us, "again_us": again, "short_us": short, "tiles": found,
                "cut": len(found) <= len(others) and time.monotonic() > self.until}  # fmt: skip

    def _time(self, case: Case, launches: int) -> float:
        calls = [partial(case.fused, layer) for layer in range(len(case.caches))]
        return time_calls(calls, launches, 3, self._other.sum)

    def _entry(
        self, shape: Shape, rows: int, tokens: int, way: tuple[EarlyTile, int], us: float, facts: dict[str, int]
    ) -> dict[str, Any]:
        tile, piece = way
        used, share = splits_in_use(tile, shape, rows, tokens, self.sms, piece)
        return {
            "us": us,
            **asdict(tile),
            "piece": piece,
            "used": used,
            "share": share,
            "together": together(tile, shape),
            **facts,
        }


def resources(kernel: Any) -> dict[str, int]:
    """What a compiled kernel takes: registers of a thread, bytes it spills, shared memory of a program."""
    if not hasattr(kernel, "n_regs"):
        return {}
    return {"regs": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def told(shape: Shape, point: dict[str, Any]) -> str:
    """A line for who watches."""
    best = min(point["tiles"], key=lambda each: each["us"])
    own, floor = point["own_us"], point["floor_us"]
    words = EarlyTile(**{name: best[name] for name in EarlyTile.__slots__})
    of = f"{shape!s:12s} {point['rows']:3d} rows of {point['tokens']:4d} +- {point['ragged']}: floor {floor:6.1f}"
    rule = f"rule {own:6.1f} ({own / floor:.2f} x; short {point['short_us']:.1f})"
    return f"{of}  {rule}  best {best['us']:6.1f} ({best['us'] / floor:.2f} x), {best['used']} a row, {words} {best['piece']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON")
    parser.add_argument("--seconds", type=float, default=180, help="after which nothing new is begun")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", choices=[str(shape) for shape in SHAPES], default=None)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    chosen = [shape for shape in SHAPES if options.shapes is None or str(shape) in options.shapes]
    ahead = Ahead()
    try:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        for shape in chosen:
            kernels = kernels_of(shape, options.rows, sms)
            say(
                f"{shape}: {len(kernels)} kernels, {ahead.ask(shape, kernels)} to compile, {time.monotonic() - begin:.0f} s"
            )
        rate = read_bytes_per_us()
        card = {"card": torch.cuda.get_device_name(), "sms": sms, "bytes_per_us": rate, "bound": BOUND,
                "torch": torch.__version__, "triton": version("triton")}  # fmt: skip
        say(json.dumps(card))
        bench = Bench(sms, rate, begin + options.seconds)
        with options.out.open("w", encoding="utf-8") as out:
            out.write(json.dumps(card) + "\n")
            for shape in chosen:
                if not sweep(bench, ahead, shape, options.rows, out, begin):
                    return
    finally:
        ahead.close()


def sweep(bench: Bench, ahead: Ahead, shape: Shape, all_rows: Sequence[int], out: Any, begin: float) -> bool:
    """All points of a shape; False once time is over."""
    for complaint in ahead.load(shape):
        say(f"  not compiled: {complaint}")
    cache = early_decode_kernel.device_caches[0][0]
    known = len(cache)
    say(f"{shape}: kernels are there, {time.monotonic() - begin:.0f} s")
    for rows, tokens, ragged in points(all_rows):
        if time.monotonic() > bench.until:
            say("time is over")
            return False
        point = bench.measure(shape, rows, tokens, ragged)
        out.write(json.dumps(point) + "\n")
        out.flush()
        say(f"{told(shape, point)}  {time.monotonic() - begin:.0f} s")
        torch.cuda.empty_cache()
    if len(cache) > known:
        say(f"  {len(cache) - known} kernels were compiled while measuring")
    return True


if __name__ == "__main__":
    main()
