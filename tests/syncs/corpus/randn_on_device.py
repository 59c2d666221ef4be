# expected: none
"""Randn on device."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    return ()


def step() -> None:
    """The measured part."""
    torch.randn(16, device="cuda")
