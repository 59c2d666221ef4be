"""Shapes of prompt steps, small enough for tests to meet all of their kinds; and fewer graphs of each shape."""

from __future__ import annotations

import pytest

from headway.runner.graphs import WHOLE_STEP_VARIANTS
from headway.runner.split_step import tail_variants

SIZES: dict[str, object] = {
    "FEW_ROWS": 2, "SOME_ROWS": 3, "MANY_ROWS": 6, "SMALL": (8, 16), "SMALL_SOME": (16,), "SMALL_MANY": (8, 16),
    "SMALL_MOST": (8, 16), "LARGE": (32,), "MANY_PROMPTS": (16,), "FEW_PROMPTS": 1, "MORE_PROMPTS": 3,
    "LONG_PROMPTS": (2, 4),
}  # fmt: skip


def use_small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines built from now on capture these."""
    for name, value in SIZES.items():
        monkeypatch.setattr(f"headway.runner.prefill_graphs.{name}", value)


def use_few_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines built from now on capture two ways of sampling for each shape, greedy and whatever is asked, instead of fifteen.

    With drafts the drafter is a part of each graph, and capturing them takes as long as the test's steps. Engines that capture
    all of them: ``tests/sim/test_engine.py``, and with drafts ``tests/sim/test_kinds.py``.
    """
    for module in ("engine.warm_up", "runner.graphs"):
        monkeypatch.setattr(f"headway.{module}.WHOLE_STEP_VARIANTS", WHOLE_STEP_VARIANTS[:1])
    monkeypatch.setattr("headway.engine.warm_up.tail_variants", lambda every_edit: tail_variants(every_edit)[-1:])
