# expected: none
"""Backward."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    w = torch.ones(8, device="cuda", requires_grad=True)
    return (w,)


def step(w: Any) -> None:
    """The measured part."""
    (w * 2).sum().backward()
