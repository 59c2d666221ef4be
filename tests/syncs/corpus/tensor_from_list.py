# expected: waits, kind=upload
"""Tensor from list."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    return ()


def step() -> None:
    """The measured part."""
    torch.tensor([1, 2, 3], device="cuda")
