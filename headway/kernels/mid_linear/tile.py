"""What a program of the linear layers for up to 256 rows does: ``MidTile``. Imports no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from headway.core.ints import cdiv

Kind = Literal["mid_linear", "mid_gate_up", "bare_linear", "bare_gate_up", "mid_add", "linear_parts"]
"""The op's name; "bare_linear" and "bare_gate_up" are ``mid_linear`` and ``mid_gate_up`` of what is normalised already, without
squares."""


def is_early(op: str) -> bool:
    """Whether ``op`` is one of these."""
    return op in get_args(Kind)


UNROLLED = 24
"""Chunks up to which the kernel's loop is unrolled whole. Unrolled further, a kernel takes its assembler many seconds."""

SHARED_LIMIT = 227 * 1024

SCRATCH = 512
"""Bytes that changes of layout may take beside a program's buffers."""


@dataclass(frozen=True, slots=True)
class MidTile:
    """One program's work.

    Attributes:
        wide: weight rows per program, gate and up counted apart; a power of two from 16, or, where no parts are summed
            apart, one and a smaller one.
        block_k: inputs per chunk, 64, 128 or 256.
        splits: parts of K that different programs sum; 1 but for ``linear_parts``.
        w_ahead: chunks of weights that are copied before the kernel waits for its activations.
        x_ahead: chunks of activations in flight, at most w_ahead.
        num_warps: 4 or 8, and 8 for 128 rows.
        rows: rows of activations per program, 64 or 128; those beyond T cost no bytes.
        trailing: products that may still run when the next one starts, 0 or 1; 1 takes one more buffer of each kind.
        cluster: parts of K that the programs of a cluster sum and bring together, 1, 2, 4 or 8; 1 but for ``mid_add``.
        producer: a warp of its own copies each chunk when a buffer is free, of which there are w_ahead = x_ahead for weights
            and activations alike. For up to 64 rows; persistent programs take several tiles, but for ``mid_add``.
        turn: chunks per turn of the kernel's loop, a multiple of both numbers of buffers; 0: see ``ring``.
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
    producer: bool = False
    turn: int = 0

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
        if self.producer:
            return self.w_ahead, self.x_ahead
        return min(self.w_ahead + more, chunks), min(self.x_ahead + more, chunks)

    def ring(self, inputs: int) -> int:
        """Chunks per turn of the kernel's loop: all of them, or with many as few as use every buffer equally often."""
        chunks, turn = self.chunks(inputs), self.turn or self.least_turn(inputs)
        return turn if turn < chunks and (self.turn or chunks > UNROLLED) else chunks

    def least_turn(self, inputs: int) -> int:
        """The fewest chunks that use every buffer equally often."""
        return math.lcm(*self.buffers(inputs))

    def room_bytes(self) -> int:
        """Where a program's share of a cluster's sums arrives: f32 rows, 8 more than ``wide`` apart."""
        return 16 + 4 * self.rows * (self.wide + 8) if self.cluster > 1 else 0

    def shared_bytes(self, inputs: int) -> int:
        """What a program's buffers take."""
        weights, activations = self.buffers(inputs)
        outgoing = 2 * self.rows * self.wide if self.producer else 0
        return 2 * self.block_k * (weights * self.wide + activations * self.rows) + self.room_bytes() + outgoing

    def residents(self, inputs: int) -> int:
        """Programs with a producer warp that an SM has room for."""
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
            and (self.producer or self._turns_well(inputs))
            and (self.producer or self.w_ahead <= chunks)
            and min(columns) >= 8
            and (more == 0 or (more & (more - 1) == 0 and self.splits == self.cluster == 1))
            and (not self.producer or self._copies_well())
            and self.shared_bytes(inputs) + SCRATCH <= SHARED_LIMIT
        )

    def _turns_well(self, inputs: int) -> bool:
        """Whether the kernel's loop is short, and each of its turns uses every buffer equally often."""
        ring, chunks = self.ring(inputs), self.chunks(inputs)
        return ring <= UNROLLED and (ring == chunks or ring % self.least_turn(inputs) == 0)

    def _copies_well(self) -> bool:
        """Whether a producer warp's tile is one of those its kernels know."""
        plain = (self.block_k, self.splits, self.num_warps, self.rows, self.trailing) == (64, 1, 4, 64, 0)
        return plain and self.w_ahead == self.x_ahead and self.wide in (32, 64, 128, 256)
