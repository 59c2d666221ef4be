# expected: none
"""Stream wait stream."""

from __future__ import annotations

from typing import Any

import torch


def make() -> tuple[Any, ...]:
    """What the step works on."""
    s = torch.cuda.Stream()
    return (s,)


def step(s: Any) -> None:
    """The measured part."""
    s.wait_stream(torch.cuda.current_stream())
