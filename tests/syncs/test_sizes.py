"""Copies of nothing are no waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.syncs.test_simulate import kinds, pretence, rand

__all__ = ["pretence"]

BY_SIZE: dict[str, Callable[[int], Any]] = {
    "tolist": lambda n: rand(n).tolist(),
    "cpu": lambda n: rand(n).cpu(),
    "to": lambda n: rand(n).to("cpu"),
    "numpy": lambda n: rand(n).numpy(force=True),
    "repr": lambda n: repr(rand(n)),
    "str": lambda n: str(rand(n)),
    "format": lambda n: f"{rand(n)}",
    "equal": lambda n: torch.equal(rand(n), rand(n)),
    "tensor": lambda n: torch.tensor([1.0] * n, device="cuda"),
    "as_tensor": lambda n: torch.as_tensor([1.0] * n, device="cuda"),
    "new_tensor": lambda n: rand(2).new_tensor([1.0] * n),
    "index": lambda n: rand(5)[[2] * n],
    "upload": lambda n: torch.ones(n).to("cuda"),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_nothing_waits_for_no_bytes(name: str) -> None:
    """A copy of an empty tensor is none; of any other it is one wait."""
    assert kinds(lambda: BY_SIZE[name](0)) == []
    assert len(kinds(lambda: BY_SIZE[name](1))) == len(kinds(lambda: BY_SIZE[name](3))) == 1
