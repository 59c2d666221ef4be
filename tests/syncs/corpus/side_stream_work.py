# expected: none
"""Side stream work."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    s = torch.cuda.Stream()
    return (x, s)


def step(x: Any, s: Any) -> None:
    """The measured part."""
    with torch.cuda.stream(s):
        x + 1
