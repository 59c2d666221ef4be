"""Where the linear layers for 17 to 128 rows are used, and with which tile. Imports no Triton.

``TABLE`` holds what ``bench/ops/mid_linear.py`` measured on one H200 in bfloat16: the tiles that made whole layers fastest,
where they beat layers of separate kernels. Other shapes are left to ``F.linear``; nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from headway.core.ints import cdiv

Kind = Literal["mid_linear", "mid_gate_up", "linear_parts"]
"""The op's name."""

MAX_ROWS = 128
"""More rows would not fit into a program's shared memory with enough copies in flight."""

SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True, slots=True)
class MidTile:
    """One program's work.

    Attributes:
        wide: weight rows per program, gate and up counted apart; a power of two from 16.
        block_k: inputs per chunk, 64 or 128.
        splits: parts of K that different programs sum; 1 but for ``linear_parts``.
        w_ahead: chunks of weights that are copied before the kernel waits for its activations.
        x_ahead: chunks of activations in flight, at most w_ahead.
        num_warps: 4 or 8, and 8 for more than 64 rows.
    """

    wide: int
    block_k: int
    splits: int
    w_ahead: int
    x_ahead: int
    num_warps: int

    def chunks(self, inputs: int) -> int:
        """Chunks per program for K = ``inputs``."""
        return inputs // (self.block_k * self.splits)

    def shared_bytes(self, rows: int, inputs: int) -> int:
        """What a program's buffers take."""
        chunks = self.chunks(inputs)
        weights, activations = min(self.w_ahead + 1, chunks), min(self.x_ahead + 1, chunks)
        return 2 * self.block_k * (weights * self.wide + activations * row_block(rows))

    def fits(self, rows: int, inputs: int) -> bool:
        """Whether the kernel can run it."""
        chunks = self.chunks(inputs)
        whole = inputs % (self.block_k * self.splits) == 0
        columns = self.wide * min(self.num_warps, row_block(rows) // 16) // self.num_warps
        return (
            whole
            and 1 <= self.x_ahead <= self.w_ahead <= chunks
            and columns >= 8
            and self.shared_bytes(rows, inputs) <= SHARED_LIMIT
        )


TABLE: Mapping[tuple[Kind, int, int], Mapping[int, MidTile]] = MappingProxyType(
    {
        # Qwen3-0.6B
        ("mid_linear", 4096, 1024): {32: MidTile(32, 128, 1, 4, 4, 4), 64: MidTile(32, 128, 1, 8, 8, 4)},
        ("mid_gate_up", 6144, 1024): {32: MidTile(64, 64, 1, 8, 5, 4), 64: MidTile(32, 64, 1, 8, 8, 4)},
        ("linear_parts", 1024, 2048): {32: MidTile(32, 64, 4, 8, 8, 4), 64: MidTile(64, 64, 4, 8, 8, 4)},
        ("linear_parts", 1024, 3072): {32: MidTile(64, 64, 4, 12, 12, 4), 64: MidTile(32, 128, 3, 8, 8, 4)},
    }
)
"""(op, N, K) -> row bucket -> tile; buckets that are absent lost."""


def row_bucket(rows: int) -> int:
    """What the table counts rows in: 32, 64 or 128."""
    return 32 if rows <= 32 else 64 if rows <= 64 else 128


def row_block(rows: int) -> int:
    """Rows of the kernel's products; those beyond T cost no bytes."""
    return 64 if rows <= 64 else 128


def mid_rows(kind: Kind, outputs: int, inputs: int) -> int:
    """The largest number of rows for which ``kind`` beats the separate kernels on a 16-bit weight [N, K]; 0: none."""
    return max(TABLE.get((kind, outputs, inputs), {}), default=0)


def has_warpgroups(device: torch.device) -> bool:
    """Whether the kernel's products exist there: Hopper's, which later GPUs lack."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def tile_for(kind: Kind, rows: int, outputs: int, inputs: int) -> MidTile:
    """The tile for [rows, K] x [N, K]^T, wanted by ``mid_rows`` or not.

    Raises:
        ValueError: K is no multiple of 64, or there are more than 128 rows.
    """
    if inputs % 64 or rows > MAX_ROWS:
        raise ValueError(f"{kind} takes up to {MAX_ROWS} rows and K a multiple of 64, not {rows} and K={inputs}")
    found = TABLE.get((kind, outputs, inputs), {}).get(row_bucket(rows))
    return found or _default_tile(kind, row_block(rows), outputs, inputs)


def _default_tile(kind: Kind, block: int, outputs: int, inputs: int) -> MidTile:
    """32 weight rows a program, and enough splits that most processors have one."""
    splits = 1
    if kind == "linear_parts":
        while splits < 8 and cdiv(outputs, 32) * splits < 128 and inputs % (128 * splits) == 0:
            splits *= 2
    chunks = inputs // (64 * splits)
    ahead = min(chunks, 5 if block == 64 else 3)
    return MidTile(32, 64, splits, min(chunks, 16), ahead, block // 16)
