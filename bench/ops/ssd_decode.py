"""Times a mixer of Mamba-2 between its products in decode steps, in one launch and in two, against the bytes of its states.

    python bench/ops/ssd_decode.py [--shape mamba2-780m nemotron-h-8b] [--rows 1 8 64 256] [--state bfloat16] [--tiles]

``--tiles`` tries other sizes of programs, too. Several layers' states are in one CUDA graph, so none of them is found in the
L2 cache; columns are microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from limits import BYTES_PER_US
from timing import time_calls

from headway.kernels.causal_conv.triton import causal_conv
from headway.kernels.ssd_decode import triton as one_launch
from headway.kernels.ssd_decode.reference import composed
from headway.kernels.ssd_scan.triton import ssd_scan

SHAPES = {"mamba2-780m": (48, 64, 1, 128), "nemotron-h-8b": (128, 64, 8, 128)}
"""Heads, P, groups, N."""
TAPS, LAYERS = 4, 6
TILES = [(16, 2), (16, 4), (32, 2), (32, 8), (64, 4), (64, 8)]


def layer(shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype) -> tuple[object, ...]:
    """Arguments of ``ssd_decode``: every row at a position of its own."""
    heads, width, groups, size = shape
    channels = heads * width + 2 * groups * size
    half, wide = partial(torch.randn, dtype=torch.bfloat16, device="cuda"), partial(torch.rand, device="cuda")
    ints = partial(torch.arange, dtype=torch.int32, device="cuda")
    return (
        half(rows, channels), half(channels, TAPS), half(channels), half(rows, TAPS, channels), half(rows, heads), wide(heads),
        -wide(heads), wide(heads), 0.0, float("inf"), wide(rows, heads, width, size).to(dtype), ints(rows + 1), ints(rows),
        ints(rows) + 500, torch.zeros(32, dtype=torch.int32, device="cuda"), 0, 1, 1,
    )  # fmt: skip


def both(*args: object) -> torch.Tensor:
    """The two operations."""
    return composed(causal_conv, ssd_scan, args[0], args[1:4], args[4:11], args[11:])  # type: ignore[arg-type]


def timed(form: Callable[..., torch.Tensor], layers: list[tuple[object, ...]]) -> float:
    return time_calls([partial(form, *args) for args in layers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["mamba2-780m"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 64, 256])
    parser.add_argument("--state", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.state)
    for name in options.shape:
        for rows in options.rows:
            layers = [layer(SHAPES[name], rows, dtype) for _ in range(LAYERS)]
            heads, width, _, size = SHAPES[name]
            floor = 2 * rows * heads * width * size * dtype.itemsize / BYTES_PER_US
            line = f"{name} {rows:4} rows: bytes {floor:6.1f}  two {timed(both, layers):6.1f}"
            line += f"  one {timed(one_launch.ssd_decode, layers):6.1f}"
            for tile in TILES if options.tiles else []:
                with patch.object(one_launch, "tile_of", lambda *_, tile=tile: tile):
                    line += f"  {tile[0]}x{tile[1]} {timed(one_launch.ssd_decode, layers):6.1f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
