# expected: none
"""Embedding."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    w = torch.ones(16, 4, device="cuda")
    i = torch.arange(8, device="cuda")
    return (w, i)


def step(w: Any, i: Any) -> None:
    """The measured part."""
    torch.nn.functional.embedding(i, w)
