"""Programmatic dependent launch: the programs of a kernel start while the kernel before it still runs.

In a decode step every kernel is short, and between two of them the card drains, launches and fills again. A kernel that is
launched early does in that time what needs nothing of the kernel before it (reading weights into registers), then waits for
it. So each such kernel keeps to one order:

1. ``start_next``, first of all: the kernel after it may start once every program has said so.
2. Loads of what no kernel of this step writes: weights, keys and values of earlier steps. Also of what a kernel wrote that has
   surely ended, because one behind it calls ``start_next`` after its wait. The embedding does, which every forward pass
   begins with: all after it may read the step's index tensors (positions, slots, lengths, block tables).
3. ``wait_for_inputs``: all earlier kernels have ended and their writes are visible. Every program waits, also one
   that has nothing to do: a kernel that ended before the one it did not wait for would let its successors pass both.
4. Everything else; no store comes before the wait.

CUDA C++ Programming Guide, programmatic dependent launch; PTX griddepcontrol. Needs compute capability 9.0.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.switches import EARLY_LAUNCH, is_on


@triton.jit
def start_next(EARLY: tl.constexpr):
    """Let the next kernel's programs start as soon as there is room for them."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Return when all kernels before this one have ended."""
    if EARLY:
        gdc_wait()


@lru_cache(maxsize=16)
def launch_early(device: torch.device) -> dict[str, Any]:
    """Arguments for the launch of a kernel with an ``EARLY`` parameter."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if able and is_on(EARLY_LAUNCH):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
