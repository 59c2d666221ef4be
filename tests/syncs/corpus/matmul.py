# expected: none
"""Matmul."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    a = torch.ones(32, 32, device="cuda")
    return (a,)


def step(a: Any) -> None:
    """The measured part."""
    a @ a
