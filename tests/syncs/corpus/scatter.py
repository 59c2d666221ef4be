# expected: none
"""Scatter."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    i = torch.arange(8, device="cuda")
    v = torch.ones(8, device="cuda")
    return (x, i, v)


def step(x: Any, i: Any, v: Any) -> None:
    """The measured part."""
    x.scatter_(0, i, v)
