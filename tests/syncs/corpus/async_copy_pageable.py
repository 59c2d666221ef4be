# expected: waits, kind=pageable
"""Async copy pageable."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(1 << 20, device="cuda")
    h = torch.ones(1 << 20)
    return (x, h)


def step(x: Any, h: Any) -> None:
    """The measured part."""
    x.copy_(h, non_blocking=True)
