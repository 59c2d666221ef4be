# expected: none
"""Clone."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    return (x,)


def step(x: Any) -> None:
    """The measured part."""
    x.clone()
