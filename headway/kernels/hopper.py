"""Where the kernels for Hopper alone run. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch

from headway.core.log import logger

GLUON_VERSIONS = ("3.6.",)
"""Triton's releases that the Gluon kernels were run with. Gluon is experimental: its names change between minor releases."""


@lru_cache(maxsize=16)
def runs_gluon(device: torch.device) -> bool:
    """Whether ``device`` has Hopper's warpgroup products, which later GPUs lack, and Triton is one the kernels are written for.

    Where not, ``F.linear`` and the kernels in plain Triton serve.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        found = version("triton")
    except PackageNotFoundError:
        found = "unknown"
    known = found.startswith(GLUON_VERSIONS)
    if not known:
        logger.info("Triton %s: the kernels in Gluon, written for %s*, are left out", found, GLUON_VERSIONS[-1])
    return known
