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
    """Three of the six: of those that share their instructions (8.0, 8.6 and 8.9) one, of the others two.

    Kernels that take turns reach every generation and every size of shared memory at half the price of all cards.
    """
    alike, others = (80, 86, 89), (90, 100, 120)
    return alike[number % 3], *(card for i, card in enumerate(others) if i != number % 3)
