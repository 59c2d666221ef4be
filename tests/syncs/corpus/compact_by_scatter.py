# expected: none
"""Compact by scatter."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    o = torch.zeros(65, device="cuda")
    return (x, o)


def step(x: Any, o: Any) -> None:
    """The measured part."""
    k = x > 0
    o.scatter_(0, torch.where(k, k.cumsum(0) - 1, 64), x)
