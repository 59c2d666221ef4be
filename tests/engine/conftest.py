"""Engines over a tiny model, and ``tests.engine.fake_core`` importable in the engine processes that tests start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import USUAL_THRESHOLDS, EngineArgs
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import MakeEngine, drain
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import save_tiny_llama

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[MakeEngine]:
    """Builds small float32 engines on the CPU; checks at the end that every slot and block came back."""
    made: list[EngineCore] = []

    def make(**overrides: Any) -> EngineCore:
        args: dict[str, Any] = {
            "model": str(tiny_model),
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 8,
            "run_ahead": 0,
        }
        thresholds = overrides.pop("thresholds", USUAL_THRESHOLDS)
        core = build_engine(EngineArgs(**(args | overrides)), progress=False, thresholds=thresholds)
        core.learn(VOCABULARY)
        made.append(core)
        return core

    yield make
    for core in made:
        drain(core)
        core.check_integrity()
        core.shutdown()
