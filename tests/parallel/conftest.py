"""Engines over a tiny model, as the engine's tests have them."""

from tests.engine.conftest import make_engine, tiny_model

__all__ = ["make_engine", "tiny_model"]
