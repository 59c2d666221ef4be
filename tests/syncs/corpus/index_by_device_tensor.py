# expected: none
"""Index by device tensor."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    i = torch.arange(8, device="cuda")
    return (x, i)


def step(x: Any, i: Any) -> None:
    """The measured part."""
    x[i]
