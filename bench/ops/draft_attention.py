"""Times attention of rows of several tokens, drafts for one, on one card: fused, turned, and as prompts are attended.

    python -m bench.ops.draft_attention [--rows 1 8 64 256] [--width 4] [--context 512] [--shapes gdn] [--cache fp8] [--tiles]
        [--shares]

us a layer, of layers with a cache each in one CUDA graph: ``plain`` has one token a row; ``prompts`` launches ``rope_kv_write``
and the kernels that the rows took before there were others; ``few`` the first of these and the kernels of decode rows;
``fused`` is ``decode_attention``, which is ``few`` where one kernel cannot do it all. Outputs are compared first. With --tiles
the fused kernel is timed with other tiles, too. With --shares all but ``plain`` are layers that share another one's keys.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bench.ops.limits import BYTES_PER_US
from bench.ops.timing import time_calls
from headway.kernels.decode_attention import decode_attention
from headway.kernels.decode_attention.reference import heads_to_write
from headway.kernels.paged_attention import launch, paged_attention
from headway.kernels.paged_attention.hopper import early_decode
from headway.kernels.paged_attention.hopper.decode_tiles import EarlyTile
from headway.kernels.paged_attention.hopper.early_decode import serves
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.testing import make_cos_sin, make_paged_inputs

SHAPES = {
    "qwen3-06b": (16, 8, 128, 128),
    "llama-8b": (32, 8, 128, 128),
    "gpt-oss": (64, 8, 64, 64),
    "gdn": (8, 2, 256, 64),
    "gemma4-e2b": (8, 1, 256, 256),
    "gemma3n-e4b": (8, 2, 256, 256),
}
"""Query heads, KV heads, head size, numbers of a head that are rotated."""
TILES = [EarlyTile(4, 1), EarlyTile(4, 1, 1.94, 8), EarlyTile(4, 2, 1.94, 4), EarlyTile(4, 2), EarlyTile(4, 2, 1.5),
         EarlyTile(2, 3), EarlyTile(2, 2), EarlyTile(2, 1), EarlyTile(2, 3, 3.0, 2), EarlyTile(4, 3, 1.5, 2)]  # fmt: skip


class Case:
    """Layers of rows of ``width`` tokens, of ``lengths`` tokens each, which are cached in the end.

    ``shape``: as in ``SHAPES``; ``bound``: of the lengths, by default 4096 or the longest; ``shares``: other layers cache all.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        lengths: Sequence[int],
        width: int,
        cached: torch.dtype,
        layers: int,
        bound: int = 0,
        device: str = "cuda",
        shares: bool = False,
    ) -> None:
        heads, kv_heads, self.size, self.rotary = shape
        self.heads, self.width, self.shares, longest = (heads, kv_heads), width, shares, max(lengths)
        self.inputs = make_paged_inputs(
            [(width, length) for length in lengths], num_decode_rows=0, heads=self.heads, size=self.size, block_size=16,
            dtype=torch.bfloat16, device=device, on_device=True, heads_first=True, cached=cached,
            bound=bound or max(longest, 4096),
        )  # fmt: skip
        one = self.inputs.k_cache
        self.caches = [
            tuple(torch.randn_like(one, dtype=torch.float32).to(cached) for _ in range(2)) for _ in range(layers)
        ]
        tokens = len(lengths) * width
        self.qkv = [
            torch.randn(tokens, (heads + (0 if shares else 2 * kv_heads)) * self.size, device=device).bfloat16()
            for _ in range(layers)
        ]
        row = torch.arange(tokens, device=device) // width
        place = torch.tensor(lengths, device=device)[row] - width + torch.arange(tokens, device=device) % width
        blocks = self.inputs.block_tables[self.inputs.row_slots[row].long(), place // 16]
        self.kv_slots, self.positions = (blocks * 16 + place % 16).int(), place.int()
        self.cos_sin = make_cos_sin(longest, self.rotary, device)
        self.norms = [torch.ones(self.size, device=device).bfloat16() for _ in range(2)]
        self.arrivals = torch.zeros(tokens, kv_heads, dtype=torch.int32, device=device)

    def tables(self) -> tuple[Any, ...]:
        inputs = self.inputs
        return inputs.block_tables, inputs.row_slots, inputs.query_start, inputs.seq_lens, self.arrivals

    def fused(self, layer: int) -> torch.Tensor:
        of = (self.positions, self.cos_sin, *self.norms, 1e-6, self.kv_slots, *self.caches[layer], self.heads[0])
        numbers = self.size**-0.5, 0, 0.0, self.inputs.max_seq_len_bound, 0, None, None, self.width, self.shares
        out: torch.Tensor = decode_attention(self.qkv[layer], *of, *self.tables(), *numbers)
        return out

    def apart(self, layer: int) -> torch.Tensor:
        """Two launches."""
        written = heads_to_write(*self.caches[layer], self.shares)
        of = (self.positions, self.cos_sin, *self.norms, 1e-6, self.kv_slots, *written, self.heads[0])
        q = rope_kv_write(self.qkv[layer], *of)
        more = None, 0, None, None, False, self.width
        sizes = (len(q) if self.width == 1 else 0), self.width, self.inputs.max_seq_len_bound
        out: torch.Tensor = paged_attention(
            q, *self.caches[layer], *self.tables(), self.size**-0.5, 0, 0.0, *sizes, *more
        )
        return out

    def time(self, call: Callable[[int], torch.Tensor]) -> float:
        layers = range(len(self.caches))
        return time_calls([partial(call, layer) for layer in layers])


def alike(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in shares of the largest value.

    Raises:
        ValueError: it is more than 2 %.
    """
    error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not error <= 0.02:
        raise ValueError(f"outputs differ by {error:.3g} of the largest")
    return error


def compile_tile(tile: EarlyTile, shape: str, width: int, cached: torch.dtype, shares: bool) -> None:
    """Fill Triton's cache."""
    with patch.object(early_decode, "early_tile", lambda *_: tile):
        Case(SHAPES[shape], [512, 512], width, cached, 1, shares=shares).fused(0)
    torch.cuda.synchronize()


def measure(shape: str, rows: int, args: argparse.Namespace, cached: torch.dtype) -> None:
    layers = 4 if rows > 128 else 16
    lengths = [args.context] * rows
    case = Case(SHAPES[shape], lengths, args.width, cached, layers, shares=args.shares)
    plain = Case(SHAPES[shape], lengths, 1, cached, layers)
    before = patch.object(launch, "takes_few", lambda *_: False)
    with before:
        expected = case.apart(0)
        prompts = case.time(case.apart)
    errors = [alike(case.fused(0), expected), alike(case.apart(0), expected)]
    times = {
        "plain": plain.time(plain.fused),
        "prompts": prompts,
        "few": case.time(case.apart),
        "fused": case.time(case.fused),
    }
    size = 2 * rows * args.context * case.heads[1] * case.size * case.caches[0][0].itemsize / BYTES_PER_US
    words = " ".join(f"{name} {us:.2f}" for name, us in times.items())
    print(
        f"{shape} {cached} W={args.width} rows={rows}: {words}; bytes {size:.2f}; errors {errors[0]:.2g} {errors[1]:.2g}",
        flush=True,
    )
    if not args.tiles or not serves(
        case.size, case.heads[0] // case.heads[1], torch.bfloat16, cached, torch.device("cuda", 0)
    ):
        return
    found = []
    for tile in TILES:
        with ExitStack() as stack:
            stack.enter_context(patch.object(early_decode, "early_tile", lambda *_, tile=tile: tile))
            try:
                alike(case.fused(0), expected)
                found.append((case.time(case.fused), tile))
            except Exception as error:  # too much shared memory, for one
                print(f"    {tile}: {type(error).__name__} {' '.join(str(error).split())[:80]}", flush=True)
    for us, tile in sorted(found, key=lambda pair: pair[0])[:6]:
        print(f"    {us:.2f} {tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-06b"], choices=list(SHAPES))
    parser.add_argument("--cache", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--shares", action="store_true", help="layers with queries alone, whose keys others write")
    args = parser.parse_args()
    cached = torch.float8_e4m3fn if args.cache == "fp8" else torch.bfloat16
    for shape in args.shapes:
        if args.tiles:
            with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
                jobs = [pool.submit(compile_tile, tile, shape, args.width, cached, args.shares) for tile in TILES]
                for job in jobs:
                    job.exception()  # what does not fit is told below
        for rows in args.rows:
            measure(shape, rows, args, cached)


if __name__ == "__main__":
    main()
