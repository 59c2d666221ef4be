"""The GPUs that kernels compile for."""

from __future__ import annotations

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability x 10 -> KB of shared memory that a program may have (CUDA C++ Programming Guide, technical
specifications)."""
EARLY = 90
"""The least that launches kernels early."""
EIGHT_BITS = 89
"""The least that has 8-bit floats."""


def cards_in_turn(number: int) -> tuple[int, ...]:
    """Two of the six: of those that share their instructions (8.0, 8.6 and 8.9) one, of the others one.

    Nine kernels that take turns reach every pair of the two, at a third of the price of all cards.
    """
    alike, others = (80, 86, 89), (90, 100, 120)
    return alike[number % 3], others[number // 3 % 3]
