"""Whole engines on two parts, one of each kind of cache and layer that Llama has not: tokens are those of one rank.

On the CPU without run-ahead, and on the simulated device with it, where each rank has a device that runs late. Pools are too
small for all, so requests are preempted; prompts come in chunks and share a beginning.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headway.core.config import EngineArgs, Thresholds
from headway.core.messages import AddRequest, EngineStats
from headway.engine.boot import build_engine
from tests.engine.harness import Answer, request, run
from tests.engine.test_depths import close
from tests.engine.tiny_grammars import PATTERN, VOCABULARY, automaton
from tests.parallel.families import configuration, write
from tests.parallel.test_engine import HALVES, THREADS, compare
from tests.parallel.waits import watched

KINDS = ("v2-lite", "v3.2-yarn-biases", "falcon-h1", "qwen3-next-moe", "gpt-oss", "gemma3n-shared", "gemma4-shared")
"""Latents, an indexer, states beside attention, states cut by heads and experts, sinks and windows, keys of other layers."""
STATES = ("falcon-h1", "qwen3-next-moe")
AHEAD = ("v2-lite", "falcon-h1", "gemma4-shared")
"""Kinds that draft ahead on two simulated devices every time: latents, rings of states, and keys of other layers with windows.
The others do so in the soak; every time they run here in parts without drafts, and ahead on one device in ``tests/sim``."""
LENGTH, BLOCK, ROWS = 64, 8, 4
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
TOLERANCE = 1e-3
"""Of log-probabilities: sums over ranks are rounded in another order, which some of these models enlarge."""
OFTEN = Thresholds(checkpoint_every=16)
"""States are kept behind every second block."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    write(configuration(request.param)[1], folder)
    return request.param, folder


@pytest.fixture(scope="module")
def wanted(kind: tuple[str, Path]) -> dict[str, Answer]:
    core = build_engine(arguments(kind[1], enable_prefix_caching=False), progress=False)
    core.learn(VOCABULARY)
    found = run(core, requests())
    core.shutdown()
    return found


def arguments(folder: Path, **more: Any) -> EngineArgs:
    args: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "max_model_len": LENGTH, "max_num_seqs": ROWS,
        "max_num_batched_tokens": 24, "block_size": BLOCK, "kv_cache_memory_bytes": 2**23, "run_ahead": 0,
    }  # fmt: skip
    return EngineArgs(**args | more)


def requests() -> list[AddRequest]:
    """More than there are slots: greedy ones, which repeat themselves so that drafts hit, and one of each harder kind."""
    rng, found = random.Random(8), []
    stem = [rng.randrange(6, 90) for _ in range(24)]
    special: dict[int, dict[str, Any]] = {
        1: {"temperature": 1.1}, 2: {"logprobs": 3, "temperature": 0.0}, 4: {"prompt_logprobs": 2, "temperature": 0.7},
        5: {"automaton": automaton("regex", PATTERN), "temperature": 1.4}, 6: {"presence_penalty": 1.2, "temperature": 0.0},
    }  # fmt: skip
    for number in range(8):
        prompt = stem[: rng.choice([0, 16, 24])] + [7, 8, 9, 10 + number] * rng.choice([1, 3])
        params = special.get(number, {"temperature": 0.0}) | {"ignore_eos": number != 5, "max_tokens": 14 + number}
        found.append(request(f"r{number}", prompt, seed=number, **params))
    return found


def check(kind: tuple[str, Path], wanted: dict[str, Answer], times: int = 1, **more: Any) -> EngineStats:
    """Figures of an engine of two parts that was asked so often."""
    name, folder = kind
    with watched() as waits:
        core = build_engine(
            arguments(folder, tensor_parallel_size=2, **THREADS | more), progress=False, thresholds=OFTEN
        )
        core.learn(VOCABULARY)
        for _ in range(times):
            answers = run(core, requests())
            assert answers.keys() == wanted.keys()
            for key, answer in answers.items():
                close(answer, wanted[key], TOLERANCE)
        core.check_integrity()
        stats = core.stats()
        core.shutdown()
        waits.check(ranks=2)
    assert stats.prefix_cache_hits or name in STATES
    return stats


@pytest.mark.usefixtures("small_pool")
def test_without_run_ahead(kind: tuple[str, Path], wanted: dict[str, Answer]) -> None:
    """Twice, so that the second time finds what the first has left in the caches."""
    stats = check(kind, wanted, times=2)
    assert stats.num_preemptions, "the pool was meant to be too small"


@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize(
    "kind", [name if name in AHEAD else pytest.param(name, marks=pytest.mark.soak) for name in KINDS], indirect=True
)
def test_ahead_with_drafts_on_the_simulated_device(kind: tuple[str, Path], wanted: dict[str, Answer]) -> None:
    """All ranks guess by themselves, keep rings of inputs for what is rejected, and replay graphs."""
    stats = check(kind, wanted, device="sim:31", run_ahead=2, speculative_config=DRAFTS)
    assert stats.num_accepted_tokens and stats.num_graph_steps
    assert stats.num_preemptions or kind[0] == "gpt-oss", "its windows leave room for all"


def test_states_are_found_again(tmp_path: Path) -> None:
    """With room for all, the second of two that begin alike goes on from a checkpoint that every rank has kept; in halves, too,
    whose checkpoints are copied once for both."""
    write(configuration("qwen3-next-moe")[1], tmp_path)
    two: dict[str, Any] = THREADS | {"tensor_parallel_size": 2, "run_ahead": 2}
    found = []
    for more in (
        {"enable_prefix_caching": False},
        two | {"device": "sim:5"},
        two | HALVES,
        two | HALVES | {"speculative_config": DRAFTS},
    ):
        core = build_engine(arguments(tmp_path, **more), progress=False, thresholds=OFTEN)
        core.learn(VOCABULARY)
        found += [run(core, requests()) for _ in range(2)]
        assert core.stats().prefix_cache_hits or "tensor_parallel_size" not in more
        core.shutdown()
    for each in found[1:]:
        compare(each, found[0])
