"""Kernel tests run Triton on the GPU when there is one, else in Triton's interpreter on CPU tensors.

Fresh memory is poisoned: every ``torch.empty`` comes back full of NaN or of the most negative integer, so an output element
that a kernel forgets to write cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def device() -> str:
    """Where Triton kernels run in this test session."""
    return DEVICE


@pytest.fixture(autouse=True)
def quickly(interpreted_quickly: None) -> None:
    """Without a GPU, Triton's interpreter is most of these tests' time."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN (floats) or the minimum (integers)."""
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=True)
    settings.fill_uninitialized_memory = fill
