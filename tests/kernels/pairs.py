"""Parametrisations of two lists that do not multiply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def pairs(left: Sequence[Any], right: Sequence[Any], each: int) -> list[Any]:
    """All pairs. Each of the left runs with ``each`` of the right, in turns; the other pairs run with the long sweeps."""

    def marks(i: int, j: int) -> tuple[pytest.MarkDecorator, ...]:
        return () if (j - i) % len(right) < each else (pytest.mark.soak,)

    return [
        pytest.param(a, b, marks=marks(i, j), id=f"{a}-{b}") for i, a in enumerate(left) for j, b in enumerate(right)
    ]
