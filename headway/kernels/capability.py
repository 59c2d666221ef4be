"""What kernels in plain Triton may use on a GPU, by its compute capability. Imports no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch

SHARED_KB: Mapping[tuple[int, int], int] = MappingProxyType(
    {
        (8, 0): 163,
        (8, 6): 99,
        (8, 7): 163,
        (8, 9): 99,
        (9, 0): 227,
        (10, 0): 227,
        (10, 3): 227,
        (12, 0): 99,
        (12, 1): 99,
    }
)
"""Compute capability -> KB of shared memory a program may have (CUDA C++ Programming Guide, technical specifications)."""
LEAST_KB, MOST_KB = min(SHARED_KB.values()), max(SHARED_KB.values())
INTERPRETED_SMS = 4
"""Stands for the device's size where kernels are interpreted on the CPU: a few splits, so that they are exercised."""


@lru_cache(maxsize=16)
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a CUDA device; Hopper's elsewhere, where kernels are interpreted."""
    if device.type != "cuda":
        return MOST_KB << 10
    return SHARED_KB.get(torch.cuda.get_device_capability(device), LEAST_KB) << 10
