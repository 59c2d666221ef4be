"""The engines of tests/engine, for the benchmarks that drive one."""

from __future__ import annotations

from tests.engine.conftest import make_engine, tiny_model

__all__ = ["make_engine", "tiny_model"]
