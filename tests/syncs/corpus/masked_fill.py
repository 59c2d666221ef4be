# expected: none
"""Masked fill."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    m = torch.zeros(64, dtype=torch.bool, device="cuda")
    return (x, m)


def step(x: Any, m: Any) -> None:
    """The measured part."""
    x.masked_fill_(m, 0.0)
