"""Where the linear layers for 3 to 256 rows are used, and with which tile. Imports no Triton.

``TABLE`` holds what ``bench/ops/mid_linear.py`` measured on one H200 in bfloat16: the tiles that made whole layers fastest,
where they beat layers of separate kernels; a tile within 0.2 us of the best stands for several numbers of rows, so that fewer
kernels are compiled at the start. Other shapes are left to ``F.linear``; nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headway.core.ints import cdiv

Kind = Literal["mid_linear", "mid_gate_up", "mid_add", "linear_parts"]
"""The op's name."""

BUCKETS = (4, 8, 16, 32, 64, 128, 192, 256)
"""What the table counts rows in."""

LEAST_ROWS = 3
"""One and two rows are for the fused layers of ``skinny_linear``, and three and four where these have no tile for four."""

MAX_ROWS = BUCKETS[-1]
"""Nobody measured more; every block of rows reads all weights from the L2 cache once more."""

UNROLLED = 48
"""Chunks up to which the kernel's loop is unrolled whole."""

SHARED_LIMIT = 227 * 1024

SCRATCH = 512
"""Bytes that changes of layout may take beside a program's buffers."""


@dataclass(frozen=True, slots=True)
class MidTile:
    """One program's work.

    Attributes:
        wide: weight rows per program, gate and up counted apart; a power of two from 16, or, where no parts are summed
            apart, one and a smaller one.
        block_k: inputs per chunk, 64 or 128.
        splits: parts of K that different programs sum; 1 but for ``linear_parts``.
        w_ahead: chunks of weights that are copied before the kernel waits for its activations.
        x_ahead: chunks of activations in flight, at most w_ahead.
        num_warps: 4 or 8, and 8 for 128 rows.
        rows: rows of activations per program, 64 or 128; those beyond T cost no bytes.
        trailing: products that may still run when the next one starts, 0 or 1; 1 takes one more buffer of each kind.
        cluster: parts of K that the programs of a cluster sum and bring together, 1, 2, 4 or 8; 1 but for ``mid_add``.
        copier: a warp of its own copies each chunk when a buffer is free, of which there are w_ahead = x_ahead for weights and
            activations alike. For up to 64 rows; programs that stay take several tiles, but for ``mid_add``.
    """

    wide: int
    block_k: int
    splits: int
    w_ahead: int
    x_ahead: int
    num_warps: int
    rows: int = 64
    trailing: int = 0
    cluster: int = 1
    copier: bool = False

    def widths(self) -> tuple[int, int]:
        """``wide`` as the largest power of two in it, and the rest."""
        first: int = 1 << (self.wide.bit_length() - 1)
        return first, self.wide - first

    def chunks(self, inputs: int) -> int:
        """Chunks per program for K = ``inputs``."""
        return inputs // (self.block_k * self.splits * self.cluster)

    def programs(self, outputs: int) -> int:
        """Programs, or clusters of them, that share N = ``outputs``."""
        return cdiv(outputs, self.wide)

    def buffers(self, inputs: int) -> tuple[int, int]:
        """Chunks of weights and of activations that a program has room for."""
        chunks, more = self.chunks(inputs), 1 + self.trailing
        if self.copier:
            return self.w_ahead, self.x_ahead
        return min(self.w_ahead + more, chunks), min(self.x_ahead + more, chunks)

    def ring(self, inputs: int) -> int:
        """Chunks per turn of the kernel's loop: with many, one use of each buffer where that comes out even, else all."""
        chunks, (weights, activations) = self.chunks(inputs), self.buffers(inputs)
        even = chunks % weights == 0 and weights % activations == 0
        return weights if chunks > UNROLLED and even else chunks

    def room_bytes(self) -> int:
        """Where a program's share of a cluster's sums arrives: f32 rows, 8 more than ``wide`` apart."""
        return 16 + 4 * self.rows * (self.wide + 8) if self.cluster > 1 else 0

    def shared_bytes(self, inputs: int) -> int:
        """What a program's buffers take."""
        weights, activations = self.buffers(inputs)
        outgoing = 2 * self.rows * self.wide if self.copier else 0
        return 2 * self.block_k * (weights * self.wide + activations * self.rows) + self.room_bytes() + outgoing

    def residents(self, inputs: int) -> int:
        """Programs with a copying warp that a processor has room for."""
        room = SHARED_LIMIT // (self.shared_bytes(inputs) + 1024)
        return max(1, min(room, 2 if self.wide <= 128 else 1))

    def fits(self, inputs: int) -> bool:
        """Whether the kernel can run it."""
        chunks = self.chunks(inputs)
        whole = inputs % (self.block_k * self.splits * self.cluster) == 0
        first, more = self.widths()
        columns = [wide * min(self.num_warps, self.rows // 16) // self.num_warps for wide in (first, more or first)]
        return (
            whole
            and 1 <= self.x_ahead <= self.w_ahead
            and (self.copier or self.w_ahead <= chunks)
            and min(columns) >= 8
            and (more == 0 or (more & (more - 1) == 0 and self.splits == self.cluster == 1))
            and (not self.copier or self._copies_well())
            and self.shared_bytes(inputs) + SCRATCH <= SHARED_LIMIT
        )

    def _copies_well(self) -> bool:
        """Whether a copying warp's tile is one of those its kernels know."""
        plain = (self.block_k, self.splits, self.num_warps, self.rows, self.trailing) == (64, 1, 4, 64, 0)
        return plain and self.w_ahead == self.x_ahead and self.wide in (32, 64, 128, 256)


TABLE: Mapping[tuple[Kind, int, int], Mapping[int, MidTile]] = MappingProxyType(
    {
        # Qwen3-0.6B
        ("mid_linear", 4096, 1024): {
            8: MidTile(32, 128, 1, 4, 4, 4), 16: MidTile(32, 128, 1, 4, 4, 4), 32: MidTile(64, 128, 1, 8, 4, 4),
            64: MidTile(64, 128, 1, 8, 4, 4), 128: MidTile(64, 64, 1, 8, 6, 4), 192: MidTile(64, 64, 1, 5, 5, 8, 128),
            256: MidTile(64, 64, 1, 5, 5, 8, 128),
        },
        ("mid_gate_up", 6144, 1024): {
            8: MidTile(64, 128, 1, 8, 4, 4), 16: MidTile(64, 128, 1, 8, 4, 4), 32: MidTile(64, 64, 1, 8, 8, 4),
            64: MidTile(64, 64, 1, 8, 8, 4), 128: MidTile(64, 64, 1, 10, 6, 8, 128, 1),
            192: MidTile(96, 64, 1, 3, 3, 8, 128), 256: MidTile(96, 64, 1, 3, 3, 8, 128),
        },
        ("mid_add", 1024, 2048): {
            8: MidTile(64, 64, 1, 4, 4, 4, cluster=8), 16: MidTile(64, 64, 1, 4, 4, 4, cluster=8),
            32: MidTile(64, 64, 1, 8, 8, 4, cluster=4), 64: MidTile(32, 64, 1, 16, 16, 4, cluster=2),
            128: MidTile(64, 64, 1, 5, 4, 4, cluster=4), 192: MidTile(64, 128, 1, 8, 3, 4, cluster=2),
            256: MidTile(64, 128, 1, 8, 3, 4, cluster=2),
        },
        ("mid_add", 1024, 3072): {
            8: MidTile(128, 64, 1, 6, 6, 8, cluster=8), 16: MidTile(128, 64, 1, 6, 6, 8, cluster=8),
            32: MidTile(64, 64, 1, 12, 12, 4, cluster=4), 64: MidTile(64, 64, 1, 12, 12, 4, cluster=4),
            128: MidTile(32, 128, 1, 12, 4, 4, cluster=2), 192: MidTile(64, 128, 1, 7, 4, 4, cluster=2),
            256: MidTile(64, 128, 1, 7, 4, 4, cluster=2),
        },
        ("linear_parts", 1024, 2048): {
            16: MidTile(64, 128, 4, 4, 4, 4), 32: MidTile(32, 64, 4, 8, 8, 4), 64: MidTile(64, 128, 4, 4, 4, 4),
            128: MidTile(32, 64, 2, 10, 6, 4, 64, 1), 192: MidTile(64, 64, 2, 8, 5, 4), 256: MidTile(64, 64, 2, 8, 5, 4),
        },
        ("linear_parts", 1024, 3072): {
            16: MidTile(32, 128, 3, 8, 8, 4), 32: MidTile(64, 64, 4, 12, 12, 4), 64: MidTile(32, 128, 3, 8, 8, 4),
            128: MidTile(32, 128, 2, 12, 2, 4, 64, 1), 192: MidTile(64, 64, 2, 8, 5, 4), 256: MidTile(64, 64, 2, 8, 5, 4),
        },
        ("mid_linear", 151936, 1024): {
            4: MidTile(128, 64, 1, 2, 2, 4), 8: MidTile(128, 64, 1, 2, 2, 4), 16: MidTile(128, 64, 1, 2, 2, 4),
            32: MidTile(128, 64, 1, 2, 2, 4), 64: MidTile(128, 128, 1, 4, 3, 4),
        },
        # Llama-3.1-8B
        ("mid_linear", 6144, 4096): {
            4: MidTile(64, 64, 1, 15, 7, 4), 8: MidTile(64, 64, 1, 15, 7, 4), 16: MidTile(64, 64, 1, 15, 7, 4),
            32: MidTile(64, 64, 1, 15, 7, 4), 48: MidTile(64, 64, 1, 15, 7, 4), 64: MidTile(64, 64, 1, 13, 13, 4, copier=True),
        },
        ("mid_gate_up", 28672, 4096): {
            4: MidTile(128, 64, 1, 3, 3, 8), 8: MidTile(128, 64, 1, 6, 6, 4, 64, 1), 16: MidTile(128, 64, 1, 6, 6, 4, 64, 1),
            32: MidTile(128, 64, 1, 3, 3, 8), 48: MidTile(128, 64, 1, 3, 3, 8), 64: MidTile(128, 64, 1, 8, 8, 4, copier=True),
        },
        ("mid_add", 4096, 4096): {
            8: MidTile(64, 128, 1, 4, 4, 4, 64, 1, cluster=2), 16: MidTile(64, 128, 1, 4, 4, 4, 64, 1, cluster=2),
            32: MidTile(32, 64, 1, 15, 15, 4), 64: MidTile(32, 64, 1, 15, 15, 4),
        },
        ("mid_add", 4096, 14336): {
            8: MidTile(64, 64, 1, 15, 7, 4, cluster=2), 16: MidTile(64, 64, 1, 15, 7, 4, cluster=2),
            32: MidTile(64, 64, 1, 14, 6, 4, 64, 1, cluster=2), 48: MidTile(64, 64, 1, 14, 6, 4, 64, 1, cluster=2),
            64: MidTile(64, 64, 1, 12, 12, 4, cluster=2, copier=True),  # with few rows copies of none cost more than they save
        },
        ("linear_parts", 4096, 4096): {
            4: MidTile(32, 64, 1, 15, 15, 4), 8: MidTile(32, 64, 1, 15, 15, 4), 16: MidTile(32, 64, 1, 15, 15, 4),
            32: MidTile(32, 64, 1, 15, 15, 4), 64: MidTile(32, 64, 1, 15, 15, 4),
        },
        ("mid_linear", 128256, 4096): {32: MidTile(128, 64, 1, 2, 2, 4, 64, 1), 64: MidTile(128, 64, 1, 2, 2, 4, 64, 1)},
        ("linear_parts", 4096, 14336): {
            4: MidTile(128, 64, 4, 5, 5, 4, 64, 1), 8: MidTile(128, 64, 4, 5, 5, 4, 64, 1), 16: MidTile(64, 64, 2, 13, 13, 4),
            32: MidTile(64, 64, 2, 13, 13, 4), 64: MidTile(64, 64, 2, 12, 12, 4, 64, 1),
        },
    }
)  # fmt: skip
"""(op, N, K) -> row bucket, or a number of rows between two -> tile for as many and fewer; buckets that are absent lost."""


def row_bucket(rows: int) -> int:
    """The smallest of ``BUCKETS`` that holds ``rows``, at most 256."""
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def mid_rows(kind: Kind, outputs: int, inputs: int) -> range:
    """The numbers of rows for which ``kind`` beats other kernels on a 16-bit weight [N, K]; empty: none."""
    found = TABLE.get((kind, outputs, inputs))
    if not found:
        return range(0)
    first = BUCKETS.index(min(found))
    return range(BUCKETS[first - 1] + 1 if first else LEAST_ROWS, max(found) + 1)


def tile_for(kind: Kind, rows: int, outputs: int, inputs: int) -> MidTile:
    """The tile for [rows, K] x [N, K]^T, wanted by ``mid_rows`` or not.

    Raises:
        ValueError: K is no multiple of 64, or there are more than 256 rows.
    """
    if inputs % 64 or rows > MAX_ROWS:
        raise ValueError(f"{kind} takes up to {MAX_ROWS} rows and K a multiple of 64, not {rows} and K={inputs}")
    found = TABLE.get((kind, outputs, inputs), {})
    most = min((most for most in found if rows <= most), default=MAX_ROWS + 1)
    return found[most] if most <= row_bucket(rows) else _default_tile(kind, rows, outputs, inputs)


def _default_tile(kind: Kind, rows: int, outputs: int, inputs: int) -> MidTile:
    """32 weight rows a program, or 64 with several blocks of rows or clusters, and enough parts of K that most processors have
    one."""
    blocks = cdiv(rows, 64)
    wide = 32 if blocks == 1 and kind != "mid_add" else 64
    splits = 1
    if kind in ("linear_parts", "mid_add"):
        while splits < 8 and cdiv(outputs, wide) * blocks * splits < 96 and inputs % (128 * splits) == 0:
            splits *= 2
    chunks = inputs // (64 * splits)
    ahead = (7, 3) if chunks > UNROLLED else (min(chunks, 512 // wide), min(chunks, 5))
    if kind == "mid_add":
        return MidTile(wide, 64, 1, *ahead, 4, cluster=splits)
    return MidTile(wide, 64, splits, *ahead, 4)
