"""The GPUs that kernels compile for."""

from __future__ import annotations

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability x 10 -> KB of shared memory that a program may have (CUDA C++ Programming Guide, technical
specifications)."""
EARLY = 90
"""The least that launches kernels early."""
EIGHT_BITS = 89
"""The least that has 8-bit floats."""
