# expected: none
"""Async pinned cast."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    p = torch.ones(64).pin_memory()
    return (p,)


def step(p: Any) -> None:
    """The measured part."""
    p.to("cuda", dtype=torch.float16, non_blocking=True)
