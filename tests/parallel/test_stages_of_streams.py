"""Stages of models whose layers read more of those before than hidden states: several streams are handed on, and layers that
read keys of others, or what others have selected, are on the stage of these."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.engine.harness import Answer
from tests.parallel.test_engine import HALVES, compare
from tests.parallel.test_stages_of_states import TWO, answers_of

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False}
SHORT: dict[str, Any] = {"max_model_len": 64}


@cache
def one_rank(name: str) -> dict[str, Answer]:
    return answers_of(name, enable_prefix_caching=False, **SHORT)[0]


@pytest.mark.parametrize(
    ("name", "depth", "more"),
    [
        ("gemma3n", 0, {}),
        ("gemma3n-shared", 2, {"speculative_config": DRAFTS}),
        ("gemma3n-shared", 1, HALVES),
        ("gemma4-shared", 4, {}),
        ("glm-dsa-shared", 2, {}),
        pytest.param("gemma3n", 4, {"tensor_parallel_size": 2}, marks=pytest.mark.soak),
    ],
)
def test_two_stages(name: str, depth: int, more: dict[str, Any]) -> None:
    found, stats = answers_of(name, run_ahead=depth, **SHORT | TWO | more)
    compare(found, one_rank(name))
    assert stats.prefix_cache_hits > 0
    assert bool(stats.num_draft_tokens) == ("speculative_config" in more)


def test_on_the_simulated_device() -> None:
    """In graphs."""
    found, stats = answers_of("gemma3n-shared", run_ahead=2, device="sim:61", **SHORT | TWO)
    compare(found, one_rank("gemma3n-shared"))
    assert stats.num_graph_steps
