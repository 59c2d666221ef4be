# expected: none
"""Pinned async up."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    p = torch.ones(64).pin_memory()
    return (x, p)


def step(x: Any, p: Any) -> None:
    """The measured part."""
    x.copy_(p, non_blocking=True)
