# expected: waits, kind=pageable
"""Async to pageable host."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    h = torch.ones(64)
    return (x, h)


def step(x: Any, h: Any) -> None:
    """The measured part."""
    h.copy_(x, non_blocking=True)
