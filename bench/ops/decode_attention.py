"""Chooses the tiles of the decode attention kernel for Hopper, inside whole decoder layers on one card.

    python bench/ops/decode_attention.py [--rows 1 8 64] [--model llama-8b] [--context 448] [--cache fp8] [--alone]

A tile is compared with the table's, then timed in layers whose linear layers are those of the engine, 28
(or 8) of them with a KV cache each in one CUDA graph. The last column is the difference to the table's tile. --alone leaves the
linear layers out: from 64 rows on they are the smaller part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from layers import MODELS, Layers, layers_of, random, say
from limits import BYTES_PER_US
from timing import time_calls

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.paged_attention.hopper import early_decode
from headway.kernels.paged_attention.hopper.decode_tiles import WARP_KEYS, EarlyTile
from headway.kernels.paged_attention.tiles import choose_splits

SHARED = 228 * 1024
TABLE = early_decode.early_tile


def candidates(programs: int, context: int, bound: int, itemsize: int) -> list[EarlyTile]:
    """Each way of splitting rows of ``context`` tokens once, unless it fills all processors twice over."""
    found: dict[tuple[int, ...], EarlyTile] = {}
    sms = num_sms(torch.device("cuda", 0))
    for warps, stages, residents in product((1, 2, 4, 8), (1, 2, 3, 4), (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)):
        block = WARP_KEYS * warps
        most, least_tiles = choose_splits(programs, bound, block, sms, residents)
        tiles = cdiv(context, block)
        share = cdiv(tiles, max(1, min(cdiv(tiles, least_tiles), most)))
        used = cdiv(tiles, share)
        together = SHARED // (2 * stages * block * 128 * itemsize + 4096)
        if stages > share + 1 or together == 0 or (used > 1 and used * programs > 2 * sms * together):
            continue
        clusters = [size for size in (2, 4, 8) if size >= used > size // 2 and used > 1]
        for cluster in (1, *clusters):
            found.setdefault((warps, stages, used, cluster), EarlyTile(warps, stages, residents, cluster))
    return list(found.values())


class Attention(Layers):
    """Layers of attention alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        outputs = self.weights[0]["qkv"].shape[0]
        self.projections = [random(self.residual.shape[0], outputs) for _ in self.weights]

    def spent(self) -> float:
        return time_calls([self._attend_all], 1) / len(self.weights)

    def _attend_all(self) -> None:
        for qkv in self.projections:
            self.attend(qkv)


def use(tile: EarlyTile | None) -> None:
    """Have the launcher take ``tile``, None for the table's."""
    early_decode.early_tile = TABLE if tile is None else lambda *_: tile


def attended(made: Layers, qkv: torch.Tensor) -> torch.Tensor:
    caches, made.caches = made.caches, iter([(made.inputs.k_cache, made.inputs.v_cache)])
    try:
        return made.attend(qkv).float()
    finally:
        made.caches = caches


def check(made: Layers, rows: int, tile: EarlyTile) -> None:
    """Raises when ``tile`` does not give what the table's gives, or not the same twice."""
    qkv = random(rows, made.weights[0]["qkv"].shape[0])
    use(None)
    attended(made, qkv)  # writes keys that other rows may read: this bench's KV slots are anybody's
    expected = attended(made, qkv)
    use(tile)
    found = attended(made, qkv)
    if not torch.equal(found, attended(made, qkv)):
        raise ValueError("two runs differ")
    error, largest = (found - expected).abs().max(), expected.abs().max()
    if not bool(error <= 0.02 * largest):
        raise ValueError(f"error {float(error):.3g} at values up to {float(largest):.3g}")


def compile_tile(model: str, tile: EarlyTile, cached: torch.dtype) -> None:
    """Fill Triton's cache."""
    made = Layers(model, 3, 1, 100, cached)
    use(tile)
    made.attend(random(3, MODELS[model].weight("qkv")[0]))
    torch.cuda.synchronize()


def sweep(model: str, rows: int, context: int, cached: torch.dtype, alone: bool) -> None:
    made = (Attention if alone else Layers)(model, rows, layers_of(model), context, cached)
    table = made.spent()
    cache = made.inputs.k_cache
    programs = rows * cache.shape[2]
    tiles = candidates(programs, context, made.inputs.max_seq_len_bound, cache.itemsize)
    chosen = TABLE(programs, made.shape.heads // cache.shape[2], 132, cache.itemsize)
    floor = 2 * rows * context * cache.shape[2] * cache.shape[3] * cache.itemsize / BYTES_PER_US
    say(f"\n{model} M={rows}, {context} tokens: {table:.2f} us a layer with {chosen}; cache's floor {floor:.1f}")
    found: list[tuple[float, EarlyTile]] = []
    for tile in tiles:
        try:
            check(made, rows, tile)
            found.append((made.spent(), tile))
        except Exception as error:  # too much shared memory, for one
            say(f"    {tile}: {type(error).__name__} {' '.join(str(error).split())[:80]}")
    use(None)
    for us, tile in sorted(found, key=lambda pair: pair[0])[:12]:
        say(f"  {us:.2f} ({us - table:+.2f}) {tile}")
    say(f"  the table's again: {made.spent():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-0.6b")
    parser.add_argument("--context", type=int, default=448, help="tokens a row; fused layers only")
    parser.add_argument("--cache", choices=("auto", "fp8"), default="auto", help="of keys and values; auto: bfloat16")
    parser.add_argument("--alone", action="store_true", help="attention without linear layers")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    cached = torch.float8_e4m3fn if options.cache == "fp8" else torch.bfloat16
    kv_heads = MODELS[options.model].kv_heads
    wanted = {
        replace(tile, residents=3.0)
        for rows in options.rows
        for tile in candidates(rows * kv_heads, options.context, 4096, cached.itemsize)
    }
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_tile, options.model, tile, cached) for tile in wanted]:
            if job.exception():
                say(f"compiling: {job.exception()}")
    for rows in options.rows:
        sweep(options.model, rows, options.context, cached, options.alone)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
