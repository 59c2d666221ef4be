# expected: waits, kind=upload
"""New tensor."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    return (x,)


def step(x: Any) -> None:
    """The measured part."""
    x.new_tensor([1.0, 2.0])
