# expected: none
"""Stream wait event."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(64, device="cuda")
    e = torch.cuda.Event()
    s = torch.cuda.Stream()
    return (x, e, s)


def step(x: Any, e: Any, s: Any) -> None:
    """The measured part."""
    e.record()
    s.wait_event(e)
