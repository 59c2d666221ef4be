"""Engines over a tiny model, as the engine's tests have them; most of them capture few graphs for each shape."""

from __future__ import annotations

import pytest

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
