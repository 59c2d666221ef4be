"""Two ranks of all kinds over a network that dawdles: see ``tests.parallel.scenarios``."""

from __future__ import annotations

import pytest

from tests.parallel.scenarios import SHARE, play


@pytest.mark.parametrize("first", [110, 170, 230, 260])
def test_some(first: int) -> None:
    """Of parts, stages, both, and replicas that share experts."""
    play(range(first, first + 1))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(100))
def test_a_thousand(block: int) -> None:
    play(range(SHARE * block, SHARE * (block + 1)))
