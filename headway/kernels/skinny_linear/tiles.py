"""Where the fused linear layers are used, and with which tile. Imports no Triton.

``TABLE`` holds what ``bench/ops/linear.py`` measured on one H200 in bfloat16, for the shapes of Qwen3-0.6B and Llama-3.1-8B:
the tiles that made whole layers fastest, where they beat layers of separate kernels. Other shapes follow ``_rule`` and
``_default_tile``; nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headway.core.ints import cdiv, next_power_of_2

Kind = Literal["skinny_linear", "norm_linear", "norm_gate_up", "linear_add"]
"""The op's name."""

MAX_ROWS = 16
"""Above it ``F.linear`` is at least as fast for every kind."""

MIB = 2**20


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
        held: passes whose weights are taken into registers before the kernel waits for its activations.
    """

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    held: int

    @property
    def step(self) -> int:
        """Inputs per pass."""
        return self.block_k * max(1, self.splits)


_HEAD = Tile(32, 64, 2, 2, 4, 0)

TABLE: Mapping[tuple[Kind, int, int], Mapping[int, Tile]] = MappingProxyType(
    {
        # Qwen3-0.6B
        ("norm_linear", 4096, 1024): {
            1: Tile(4, 512, 0, 1, 1, 2), 2: Tile(8, 128, 2, 2, 1, 4), 4: Tile(16, 64, 4, 4, 1, 4),
            8: Tile(16, 128, 4, 4, 1, 2), 16: Tile(16, 128, 4, 4, 3, 1),
        },
        ("norm_gate_up", 6144, 1024): {
            1: Tile(2, 512, 0, 1, 1, 2), 2: Tile(8, 256, 4, 4, 1, 1), 4: Tile(8, 64, 4, 4, 1, 4),
            8: Tile(8, 128, 4, 4, 1, 2), 16: Tile(16, 128, 4, 4, 3, 1),
        },
        ("linear_add", 1024, 2048): {
            1: Tile(4, 1024, 0, 4, 1, 2), 2: Tile(8, 128, 8, 8, 1, 2), 4: Tile(8, 256, 4, 4, 1, 2),
            8: Tile(8, 256, 4, 8, 1, 2), 16: Tile(16, 128, 4, 4, 3, 1),
        },
        ("linear_add", 1024, 3072): {
            1: Tile(8, 1024, 0, 16, 1, 3), 2: Tile(8, 128, 8, 8, 1, 3), 4: Tile(8, 256, 4, 8, 1, 3),
            8: Tile(16, 128, 4, 4, 3, 2), 16: Tile(16, 256, 4, 8, 3, 1),
        },
        ("skinny_linear", 151936, 1024): {
            1: Tile(4, 512, 0, 2, 1, 2), 2: Tile(16, 128, 4, 4, 1, 2), 4: Tile(16, 128, 4, 4, 1, 2),
            8: Tile(16, 256, 4, 4, 1, 1), 16: _HEAD,
        },
        # Llama-3.1-8B
        ("norm_linear", 6144, 4096): {
            1: Tile(4, 1024, 0, 4, 1, 4), 2: Tile(16, 128, 4, 4, 3, 1), 4: Tile(16, 128, 4, 4, 3, 1),
            8: Tile(16, 128, 4, 4, 3, 1),
        },
        ("norm_gate_up", 28672, 4096): {
            1: Tile(2, 2048, 0, 4, 1, 2), 2: Tile(8, 128, 4, 4, 3, 1), 4: Tile(8, 64, 4, 4, 3, 0),
            8: Tile(8, 64, 4, 4, 3, 0),
        },
        ("linear_add", 4096, 4096): {
            1: Tile(8, 1024, 0, 8, 1, 4), 2: Tile(8, 128, 8, 8, 1, 4), 4: Tile(8, 128, 8, 8, 1, 4),
            8: Tile(32, 128, 4, 4, 4, 0),
        },
        ("linear_add", 4096, 14336): {
            1: Tile(4, 1024, 0, 4, 3, 4), 2: Tile(16, 128, 4, 4, 3, 1), 4: Tile(32, 128, 4, 4, 4, 0),
            8: Tile(32, 128, 4, 4, 4, 0),
        },
        ("skinny_linear", 128256, 4096): {
            1: Tile(4, 2048, 0, 8, 1, 2), 2: Tile(2, 2048, 0, 2, 1, 2), 4: Tile(32, 64, 4, 4, 3, 0),
            8: Tile(32, 64, 4, 4, 3, 0), 16: Tile(32, 64, 2, 2, 4, 0),
        },
    }
)  # fmt: skip
"""(op, N, K) -> row bucket -> tile; buckets that are absent lost."""


def row_bucket(rows: int) -> int:
    """Rows are padded to it: kernels are compiled per bucket, not per number of rows."""
    return next_power_of_2(rows)


def fused_rows(kind: Kind, outputs: int, inputs: int) -> int:
    """The largest number of rows for which ``kind`` beats the separate kernels on a 16-bit weight [N, K]; 0: none."""
    measured = TABLE.get((kind, outputs, inputs))
    return _rule(kind, outputs, inputs) if measured is None else max(measured, default=0)


def _rule(kind: Kind, outputs: int, inputs: int) -> int:
    """Shapes nobody measured.

    Without a norm the kernel streams weights as fast as ``F.linear`` or faster up to 16 rows, in all six measured shapes.
    A norm is computed by every program anew: with more rows that pays only while the matrix is small.
    """
    if inputs % 8:  # weight rows do not begin at 16 bytes, so loads are narrow
        return 0
    large = 2 * outputs * inputs >= 16 * MIB
    return 8 if large and kind in ("norm_linear", "norm_gate_up") else MAX_ROWS


def tile_for(kind: Kind, rows: int, outputs: int, inputs: int) -> Tile:
    """The tile for [rows, K] x [N, K]^T; any shape, wanted by ``fused_rows`` or not."""
    bucket = row_bucket(rows)
    return TABLE.get((kind, outputs, inputs), {}).get(bucket) or _default_tile(kind, bucket, outputs, inputs)


def _default_tile(kind: Kind, bucket: int, outputs: int, inputs: int) -> Tile:
    """What won, or came within a few percent, over the measured shapes."""
    pair = 2 if kind == "norm_gate_up" else 1
    if bucket == 1:
        block_k = min(1024, max(16, next_power_of_2(inputs)))
        passes = cdiv(inputs, block_k)
        return Tile(4 // pair, block_k, 0, 4, 1 if passes <= 4 else 3, min(passes, 4))
    if outputs >= 32768 and pair == 1:
        return _HEAD
    if inputs <= 2048:  # the whole tile in registers
        return Tile((16 if inputs <= 1024 else 8) // pair, 128, 4, 4, 1, cdiv(inputs, 512))
    return Tile(16 // pair, 128, 4, 4, 3, 1)
