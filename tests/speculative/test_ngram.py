"""The n-gram drafter: tokens, log-probabilities and ends of plain decoding, in fewer steps, at every depth."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.messages import AddRequest
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import run
from tests.engine.test_depths import FEATURES
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import arguments, ask_oracle, expected, simulated
from tests.sim.rounding import settle
from tests.speculative.repetitive import LOOPS, repetitive

SMALL = {"kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES, "max_num_batched_tokens": 72}


def ngram(number: int, low: int = 1, high: int = 3) -> dict[str, Any]:
    lookup = {"prompt_lookup_min": low, "prompt_lookup_max": high, "adaptive": False}
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": number} | lookup}


def on_cpu(**sizes: Any) -> EngineCore:
    core = build_engine(arguments({"device": "cpu"} | sizes), progress=False)
    core.learn(VOCABULARY)
    return core


def check(core: EngineCore, batch: list[AddRequest]) -> None:
    answers, truth = run(core, batch), expected(batch)
    for each in batch:
        settle(answers[each.request_id], truth[each.request_id], each, ask_oracle)


@pytest.mark.parametrize(("number", "depth"), [(1, 2), (2, 0), (4, 4), (8, 1)])
def test_every_feature_on_the_cpu(number: int, depth: int) -> None:
    batch = repetitive([*FEATURES, *LOOPS], seed=number)
    core = on_cpu(run_ahead=depth, **ngram(number), **SMALL)
    check(core, batch)
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("number", "depth", "graphs"), [(3, 2, True), (5, 4, False)])
def test_on_the_simulated_device(number: int, depth: int, graphs: bool) -> None:
    batch = repetitive(["loop", "warm_loop", "loop_alone", "loop_until", "schema", "host_grammar"], seed=20 + number)
    sizes = {"max_num_seqs": 4, "enforce_eager": not graphs}
    with simulated(number, run_ahead=depth, **ngram(number), **(SMALL | sizes)) as (core, _, _):
        check(core, batch)
        assert (core.stats().num_graph_steps > 0) == graphs


@pytest.mark.parametrize("depth", [0, 2])
def test_a_text_that_repeats_itself_takes_fewer_steps(depth: int) -> None:
    batch = repetitive(["loop"], seed=1)
    steps = []
    for extra in ({}, ngram(4)):
        core = on_cpu(run_ahead=depth, **extra)
        check(core, batch)
        steps.append(core.stats().num_steps)
        core.shutdown()
    assert steps[1] < 0.6 * steps[0], "half of the drafts, or more, are right here"


@pytest.mark.soak
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("number", range(1, 9))
def test_sweep(number: int, depth: int) -> None:
    for seed in range(6):
        batch = repetitive([*FEATURES, *LOOPS], seed=100 * number + seed)
        core = on_cpu(
            run_ahead=depth, **ngram(number, 1, 1 + seed), **(SMALL if seed % 2 else {"max_num_batched_tokens": 72})
        )
        check(core, batch)
        core.check_integrity()
        core.shutdown()
