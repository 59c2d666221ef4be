"""Steps in two halves of models whose tokens meet in more than keys: latents, what an indexer selects, states; and of rows with
drafts. Tokens are those of one rank whose steps are whole.

Without run-ahead on the CPU, and ahead with drafts on the simulated device, where each rank has a device that runs late. Pools
are too small for all, so requests are preempted; prompts come in chunks, and rows of five tokens make keys and values of cached
latents, in pieces.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats
from headway.engine.boot import build_engine
from headway.runner import halves
from headway.state.batch import StepBatch
from tests.engine.harness import Answer, request, run
from tests.engine.test_depths import close
from tests.engine.tiny_grammars import PATTERN, VOCABULARY, automaton
from tests.parallel.families import MIXTURES, configuration, write
from tests.parallel.test_engine import HALVES, THREADS
from tests.parallel.test_engines_of_kinds import DRAFTS, OFTEN, TOLERANCE
from tests.parallel.waits import watched

KINDS = ("v2-lite", "v3.2-experts", "falcon-h1", "qwen3-next-moe", "mistral")
"""Latents, an indexer, states beside attention, states cut by heads and experts, windows."""

pytestmark = pytest.mark.usefixtures("small_pool")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    write(configuration(request.param)[1], folder)
    return request.param, folder


@pytest.fixture(scope="module")
def wanted(kind: tuple[str, Path]) -> dict[str, Answer]:
    return answers(kind[1], enable_prefix_caching=False)[0]


def requests(number: int = 6) -> list[AddRequest]:
    """Greedy ones, which repeat themselves so that drafts hit, one of which wants none, and one of each harder kind; some begin
    alike."""
    stem, found = [6 + (11 * n) % 80 for n in range(17)], []
    special: dict[int, dict[str, Any]] = {
        1: {"temperature": 1.1},
        2: {"disable_spec_decode": True},
        3: {"prompt_logprobs": 2, "logprobs": 2},
        4: {"automaton": automaton("regex", PATTERN)},
    }
    for nth in range(number):
        prompt = stem[: (0, 17)[nth % 2]] + [7, 8, 9, 10 + nth % 3] * (1 + 2 * (nth in (0, 2)))
        params = {"temperature": 0.0, "ignore_eos": nth != 4, "max_tokens": 9 + nth} | special.get(nth, {})
        found.append(request(f"r{nth}", prompt, seed=nth, **params))
    return found


def answers(folder: Path, number: int = 6, **more: Any) -> tuple[dict[str, Answer], EngineStats]:
    args: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "max_model_len": 40, "max_num_seqs": 4,
        "max_num_batched_tokens": 18, "block_size": 8, "kv_cache_memory_bytes": 2**23, "run_ahead": 0,
    }  # fmt: skip
    with watched() as waits:
        core = build_engine(EngineArgs(**args | more), progress=False, thresholds=OFTEN)
        core.learn(VOCABULARY)
        try:
            found = run(core, requests(number))
            core.check_integrity()
            return found, core.stats()
        finally:
            core.shutdown()
            waits.check(more.get("tensor_parallel_size", 1))


def compare(found: dict[str, Answer], wanted: dict[str, Answer]) -> None:
    assert found.keys() <= wanted.keys()
    for key, answer in found.items():
        close(answer, wanted[key], TOLERANCE)


def two_ranks(name: str) -> dict[str, Any]:
    """With whole experts where there are some."""
    return THREADS | HALVES | {"tensor_parallel_size": 2, "enable_expert_parallel": name in MIXTURES}


def test_without_run_ahead(kind: tuple[str, Path], wanted: dict[str, Answer]) -> None:
    found, stats = answers(kind[1], **two_ranks(kind[0]))
    compare(found, wanted)
    assert stats.num_preemptions, "the pool was meant to be too small"


LATE = ("qwen3-next-moe", "mistral")
"""Of the kinds those that run on the simulated device in each run of the tests."""


@pytest.mark.parametrize(
    "kind", [k if k in LATE else pytest.param(k, marks=pytest.mark.soak) for k in KINDS], indirect=True
)
def test_ahead_with_drafts_on_the_simulated_device(kind: tuple[str, Path], wanted: dict[str, Answer]) -> None:
    """Graphs of steps whose rows have drafts, or not, are of halves; so are steps with prompts."""
    found, stats = answers(kind[1], 4, device="sim:7", run_ahead=2, speculative_config=DRAFTS, **two_ranks(kind[0]))
    compare(found, wanted)
    assert stats.num_accepted_tokens and stats.num_graph_steps


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_cut_anywhere(
    kind: tuple[str, Path], wanted: dict[str, Answer], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a token, or between two rows, that nobody would choose: within rows of drafts, and in more than two pieces."""
    rng, cut, pieces = random.Random(seed), halves.cut, list[int]()

    def anywhere(batch: StepBatch) -> Any:
        tokens = len(batch.input_ids)
        if batch.max_query_len <= batch.short and rng.random() < 0.5:
            return cut(batch)
        middle = rng.randrange(1, tokens)
        pieces.append(middle)
        return (batch.slice(0, middle), batch.slice(middle, tokens)), None

    monkeypatch.setattr(halves, "cut", anywhere)
    for more in ({}, {"speculative_config": DRAFTS}):
        compare(answers(kind[1], run_ahead=2, **HALVES | more)[0], wanted)
    assert len(set(pieces)) > 4
