# expected: waits, kind=upload
"""Tensor scalar."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    return ()


def step() -> None:
    """The measured part."""
    torch.tensor(2.5, device="cuda")
