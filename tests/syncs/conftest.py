"""For all tests of the detector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def distributions_check_their_parameters() -> Iterator[None]:
    """As in a fresh process: torch.compile, wherever a test before this one ran it, switches that off for good."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)
