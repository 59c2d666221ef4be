"""Types of GGUF blocks that kernels multiply from, and how their panels are laid out (drawn in cpu/csrc/blocks.h)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

WIDTH: Final = 16
"""Outputs of a panel."""
BLOCK: Final = 32
"""Inputs of a block."""
SUPER: Final = 256
"""Inputs of a super-block."""
PLANE_ROW: Final = 64
"""Bytes of a row of a plane."""
DIGIT: Final = 254
"""Steps of the second digit of an activation in one of the first."""
NONLINEAR: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4 types."""


class BlockType(NamedTuple):
    """One type.

    Attributes:
        bits: of a stored value.
        in_supers: scales are 8-bit integers times a float16 of 256 inputs; otherwise float16.
        groups: scales of 32 inputs.
        minima: "" (none), "half" (float16), "byte" or "nibble" (integers times a second float16 of 256 inputs).
        offset: the stored value that stands for zero.
        table: stored values are places in ``NONLINEAR``.
    """

    name: str
    bits: int
    in_supers: bool
    groups: int
    minima: str
    offset: int
    table: bool = False

    @property
    def scale_bytes(self) -> int:
        """Of a block of a panel, minima included."""
        if self.in_supers:
            return WIDTH * self.groups * (2 if self.minima == "byte" else 1)
        return WIDTH * (4 if self.minima else 2)

    @property
    def block_bytes(self) -> int:
        """Of a block of a panel."""
        return self.scale_bytes + self.bits * PLANE_ROW

    @property
    def head_bytes(self) -> int:
        """Of a super-block of a panel, before its blocks."""
        return WIDTH * (4 if self.minima else 2) if self.in_supers else 0

    def panel_bytes(self, inputs: int) -> int:
        """Of a panel of a matrix with this many inputs."""
        return inputs // BLOCK * self.block_bytes + inputs // SUPER * self.head_bytes


BLOCK_TYPES: Final = MappingProxyType(
    {
        2: BlockType("Q4_0", 4, False, 1, "", 8),
        3: BlockType("Q4_1", 4, False, 1, "half", 0),
        6: BlockType("Q5_0", 5, False, 1, "", 16),
        7: BlockType("Q5_1", 5, False, 1, "half", 0),
        8: BlockType("Q8_0", 8, False, 1, "", 0),
        10: BlockType("Q2_K", 2, True, 2, "nibble", 0),
        11: BlockType("Q3_K", 3, True, 2, "", 4),
        12: BlockType("Q4_K", 4, True, 1, "byte", 0),
        13: BlockType("Q5_K", 5, True, 1, "byte", 0),
        14: BlockType("Q6_K", 6, True, 2, "", 32),
        20: BlockType("IQ4_NL", 4, False, 1, "", 0, True),
        23: BlockType("IQ4_XS", 4, True, 1, "", 0, True),
    }
)
"""ggml's number -> type."""


def aligned(num_bytes: int) -> int:
    """What a part takes in a packed buffer."""
    return -(-num_bytes // 64) * 64


def packed_bytes(kind: int, outputs: int, inputs: int) -> int:
    """Of the panels of a part. Raises ValueError for a type that is not known or inputs that are no whole blocks."""
    found = BLOCK_TYPES.get(kind)
    if found is None:
        raise ValueError(f"ggml type {kind} is not multiplied from its blocks")
    if inputs % (SUPER if found.in_supers else BLOCK):
        raise ValueError(f"{inputs} inputs are no whole blocks of {found.name}")
    return -(-outputs // WIDTH) * found.panel_bytes(inputs)
