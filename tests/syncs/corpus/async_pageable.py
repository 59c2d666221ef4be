# expected: waits, kind=pageable
"""Async pageable."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    h = torch.ones(1 << 20)
    return (h,)


def step(h: Any) -> None:
    """The measured part."""
    h.to("cuda", non_blocking=True)
