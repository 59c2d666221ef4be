"""Shapes of prompt steps, small enough for tests to meet all of their kinds."""

from __future__ import annotations

import pytest

SIZES: dict[str, object] = {
    "FEW_ROWS": 2, "SOME_ROWS": 3, "MANY_ROWS": 6, "SMALL": (8, 16), "SMALL_SOME": (16,), "SMALL_MANY": (8, 16),
    "SMALL_MOST": (8, 16), "LARGE": (32,), "MANY_PROMPTS": (16,), "FEW_PROMPTS": 1, "MORE_PROMPTS": 3,
    "LONG_PROMPTS": (2, 4),
}  # fmt: skip


def use_small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines built from now on capture these."""
    for name, value in SIZES.items():
        monkeypatch.setattr(f"headway.runner.prefill_graphs.{name}", value)
