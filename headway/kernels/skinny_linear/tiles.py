"""Which tile each linear layer runs with, by rows and shape. Imports no Triton.

The table holds what ``bench/ops/linear.py`` found best on one H200; shapes that are not in it take ``default_tile``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway.core.ints import next_power_of_2

MAX_ROWS = 16
"""Above it ``F.linear`` is at least as fast."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's work.

    Attributes:
        block_n: weight rows per program (with gate and up: pairs of rows).
        block_k: inputs per pass and split.
        splits: with tensor cores, parts of a pass that different warps sum; 0 multiplies without tensor cores, every
            warp along the same rows.
        num_warps: a power of two, a multiple of splits.
        num_stages: passes in flight; 1 leaves loads to the hardware's scheduling.
    """

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


TABLE: Mapping[tuple[int, int, int], Tile] = MappingProxyType({})
"""(row bucket, N, K) -> tile."""


def row_bucket(rows: int) -> int:
    """Rows are padded to it: kernels are compiled per bucket, not per number of rows."""
    return 16 if 4 < rows <= 16 else next_power_of_2(rows)


def tile_for(rows: int, outputs: int, inputs: int) -> Tile:
    """The tile for [rows, K] x [N, K]^T."""
    bucket = row_bucket(rows)
    return TABLE.get((bucket, outputs, inputs)) or default_tile(bucket, outputs, inputs)


def default_tile(bucket: int, outputs: int, inputs: int) -> Tile:
    """At least two programs per multiprocessor where the outputs allow, and about 16 KB of weight per program in flight."""
    if bucket <= 4:
        block_k = min(2048 if bucket <= 2 else 1024, max(16, next_power_of_2(inputs)))
        block_n = 8 if outputs >= 4096 else 4
        return Tile(block_n, block_k, 0, 4, 1 if inputs <= block_k else 2)
    return Tile(16 if outputs >= 4096 else 8, 128, 4, 4, 3)
