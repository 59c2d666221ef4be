# expected: waits, kind=size
"""Mask assign tensor."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    m = torch.zeros(64, dtype=torch.bool, device="cuda")
    v = torch.ones(0, device="cuda")
    return (x, m, v)


def step(x: Any, m: Any, v: Any) -> None:
    """The measured part."""
    x[m] = v
