"""Engines over a tiny model, as the engine's tests have them; most of them capture few graphs for each shape."""

from __future__ import annotations

from typing import Any

import pytest

from headway.engine import boot, sizes
from tests.engine.conftest import make_engine, tiny_model
from tests.runner.small_shapes import use_few_tails

__all__ = ["make_engine", "tiny_model"]

EVERY_TAIL = ("test_engine", "test_stages")
"""Modules whose engines capture every way of sampling, over ranks and over stages."""


@pytest.fixture(autouse=True)
def few_tails(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """See ``use_few_tails``."""
    if request.module.__name__.rpartition(".")[2] not in EVERY_TAIL:
        use_few_tails(monkeypatch)


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly more blocks than the longest request may want, whatever a rank's part of one takes. And rows of five tokens make
    keys and values of cached latents, in pieces."""
    monkeypatch.setattr("headway.core.latents.SHORT_ROW", 4)
    monkeypatch.setattr("headway.core.latents.SMALL_STEP", 4)
    monkeypatch.setattr("headway.attention.mla.PIECE_BYTES", 0)
    fit = sizes.fit_context

    def tight(size: Any, layout: Any, block_bytes: int, budget: int, *, explicit: bool) -> Any:
        blocks = sizes._blocks_for(size, layout, size.max_model_len) + 1
        return fit(size, layout, block_bytes, min(budget, blocks * block_bytes), explicit=explicit)

    monkeypatch.setattr(boot, "fit_context", tight)
