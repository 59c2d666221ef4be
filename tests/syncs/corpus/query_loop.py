# expected: waits, kind=query
"""Query loop."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    x = torch.ones(1024, 1024, device="cuda")
    e = torch.cuda.Event()
    return (x, e)


def step(x: Any, e: Any) -> None:
    """The measured part."""
    for _ in range(8):
        x @ x
    e.record()
    while not e.query():
        pass
