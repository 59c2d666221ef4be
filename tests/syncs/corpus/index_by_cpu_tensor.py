# expected: waits, kind=upload
"""Index by cpu tensor."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    c = torch.tensor([1, 2])
    return (x, c)


def step(x: Any, c: Any) -> None:
    """The measured part."""
    x[c]
