# expected: none
"""Clamp tensor."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    b = torch.ones((), device="cuda")
    return (x, b)


def step(x: Any, b: Any) -> None:
    """The measured part."""
    x.clamp(max=b)
