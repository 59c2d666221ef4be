"""How many examples random tests draw, and whether the same ones every time."""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import HealthCheck, settings

TIMES: Final = int(os.environ.get("HEADWAY_EXAMPLES", "1"))
"""So many times the usual number. ``make fuzz`` sets it; with 1 the examples are the same every time, so that a red run of
``make test`` can be repeated."""


def examples(count: int, **options: Any) -> settings:
    """Hypothesis' settings for a test that usually tries ``count`` examples. Machines differ, so there is no deadline."""
    return settings(max_examples=count * TIMES, deadline=None, **options)


def load_profile() -> None:
    """For tests that say nothing of their own."""
    settings.register_profile(
        "headway",
        max_examples=100 * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("headway")
