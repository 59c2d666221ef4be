"""Where the fused linear layers are used, and with which tile. Imports no Triton.

``TABLE`` holds what ``bench/ops/linear.py`` measured on one H200 in bfloat16, for the shapes of Qwen3-0.6B and Llama-3.1-8B. A
number of rows is listed only if the fused op beat the separate kernels there: ``F.linear``, 1.5 us for a norm, 1.1 us for
silu. Other shapes follow ``_rule`` and ``_default_tile``; nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headway.core.ints import next_power_of_2

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
    held: int = 1

    @property
    def step(self) -> int:
        """Inputs per pass."""
        return self.block_k * max(1, self.splits)


_HEAD = Tile(32, 64, 2, 2, 4)
_NARROW = Tile(8, 128, 4, 4, 3)
_WIDE = Tile(16, 128, 4, 4, 3)
_DEEP = Tile(8, 64, 8, 8, 4)

TABLE: Mapping[tuple[Kind, int, int], Mapping[int, Tile]] = MappingProxyType(
    {
        # Qwen3-0.6B
        ("norm_linear", 4096, 1024): {1: Tile(4, 1024, 0, 2, 1), 2: Tile(4, 1024, 0, 2, 1)},
        ("norm_gate_up", 6144, 1024): {1: Tile(2, 1024, 0, 4, 1), 2: Tile(2, 1024, 0, 2, 1)},
        ("linear_add", 1024, 2048): {1: Tile(8, 2048, 0, 8, 1), 2: Tile(4, 2048, 0, 4, 1), 4: _NARROW, 16: _NARROW},
        ("linear_add", 1024, 3072): {1: Tile(4, 1024, 0, 4, 3), 2: _DEEP, 4: _DEEP, 16: _DEEP},
        ("skinny_linear", 151936, 1024): {1: Tile(4, 1024, 0, 2, 1), 2: _HEAD, 4: _HEAD, 16: _HEAD},
        # Llama-3.1-8B; its gate_up loses from one row on (61.0 us; separate 59.1)
        ("norm_linear", 6144, 4096): {1: Tile(4, 1024, 0, 2, 1)},
        ("norm_gate_up", 28672, 4096): {},
        ("linear_add", 4096, 4096): {1: Tile(4, 2048, 0, 4, 1), 2: _WIDE, 4: _WIDE, 16: _WIDE},
        ("linear_add", 4096, 14336): {1: _WIDE, 2: _WIDE, 4: _WIDE, 16: _WIDE},
        ("skinny_linear", 128256, 4096): {1: Tile(8, 512, 0, 2, 1), 2: _HEAD, 4: _HEAD, 16: _HEAD},
    }
)
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
    A norm is computed by every program anew: that pays while the matrix is small, and the launches it saves are a
    large part of the time.
    """
    if inputs % 8:  # weight rows do not begin at 16 bytes, so loads are narrow
        return 0
    if kind in ("skinny_linear", "linear_add"):
        return MAX_ROWS
    size = 2 * outputs * inputs
    return 2 if size < 16 * MIB else 1 if size < 64 * MIB else 0


def tile_for(kind: Kind, rows: int, outputs: int, inputs: int) -> Tile:
    """The tile for [rows, K] x [N, K]^T; any shape, wanted by ``fused_rows`` or not."""
    bucket = row_bucket(rows)
    return TABLE.get((kind, outputs, inputs), {}).get(bucket) or _default_tile(kind, bucket, outputs, inputs)


def _default_tile(kind: Kind, bucket: int, outputs: int, inputs: int) -> Tile:
    """What won, or came within a few percent, over the measured shapes."""
    pair = 2 if kind == "norm_gate_up" else 1
    if bucket == 1 or (bucket == 2 and kind in ("norm_linear", "norm_gate_up")):
        block_k = min(1024, max(16, next_power_of_2(inputs)))
        return Tile(4 // pair, block_k, 0, 4 if kind == "linear_add" else 2, 1)
    if outputs >= 32768:
        return _HEAD
    return Tile((16 if outputs >= 4096 else 8) // pair, 128, 4, 4, 3)
