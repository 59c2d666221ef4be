# expected: waits, kind=upload
"""As tensor list."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    return ()


def step() -> None:
    """The measured part."""
    torch.as_tensor([1, 2], device="cuda")
