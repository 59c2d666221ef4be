# expected: waits, kind=read
"""Int."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    i = torch.arange(8, device="cuda")
    return (i,)


def step(i: Any) -> None:
    """The measured part."""
    int(i[3])
