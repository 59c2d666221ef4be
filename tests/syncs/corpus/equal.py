# expected: waits, kind=read
"""Equal."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
    return (x, y)


def step(x: Any, y: Any) -> None:
    """The measured part."""
    torch.equal(x, y)
