# expected: waits, kind=upload
"""To cuda pageable."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    h = torch.ones(64)
    return (h,)


def step(h: Any) -> None:
    """The measured part."""
    h.to("cuda")
