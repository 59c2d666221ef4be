"""What a program of the fused linear layers for few rows does: ``Tile``. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.core.ints import next_power_of_2

Kind = Literal["skinny_linear", "norm_linear", "norm_gate_up", "gate_up", "linear_add"]
"""The op's name; "gate_up" is ``norm_gate_up`` of what is normalised already."""


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


def row_bucket(rows: int) -> int:
    """Rows are padded to it: kernels are compiled per bucket, not per number of rows."""
    return next_power_of_2(rows)


def padded_rows(rows: int, tile: Tile) -> int:
    """Rows that a kernel is compiled for: tensor cores take two at least."""
    return max(row_bucket(rows), 2 if tile.splits else 1)
