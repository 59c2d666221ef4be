"""The engines of tests/engine, for the benchmarks that drive one."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from headway.cli.bench.anchors import context
from tests.engine.conftest import make_engine, tiny_model

__all__ = ["make_engine", "tiny_model"]


@pytest.fixture(autouse=True)
def what_stays_stays_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks collect around every engine; in a process of a million objects each would take a second."""
    quick = SimpleNamespace(collect=gc.collect, freeze=gc.freeze, unfreeze=lambda: None)
    monkeypatch.setattr(context, "gc", quick)
