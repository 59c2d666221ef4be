# expected: none
"""Event record."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    e = torch.cuda.Event()
    return (x, e)


def step(x: Any, e: Any) -> None:
    """The measured part."""
    e.record()
