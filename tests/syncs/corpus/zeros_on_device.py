# expected: none
"""Zeros on device."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    return ()


def step() -> None:
    """The measured part."""
    torch.zeros(16, device="cuda")
