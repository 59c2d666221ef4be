"""The references that define the kernels, run ahead, replayed and preempted, against the oracle that shares no code."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway.core.config import Thresholds
from tests.engine.demands import CHOICES, alone, mixtures, strongly_penalised
from tests.engine.harness import run
from tests.engine.naive import NaiveLlama
from tests.engine.oracle import SamplingOracle
from tests.engine.tiny_grammars import TOKENS
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import folder_of_model, simulated


@pytest.mark.parametrize(
    ("seed", "eager", "changes"),
    [
        (51, True, {"run_ahead": 0, "max_num_seqs": 1, "enable_prefix_caching": False}),
        (52, False, {"run_ahead": 3, "max_num_seqs": 6, "kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES}),
    ],
    ids=["one row, eager", "graphs, ahead, preempted"],
)
def test_every_kind_of_sampling(seed: int, eager: bool, changes: dict[str, Any]) -> None:
    naive = NaiveLlama(folder_of_model())
    oracle = SamplingOracle(lambda tokens: naive.logits(tokens).double().numpy(), TOKENS)
    rng = random.Random(seed)
    batch = alone(rng)[1::2] if eager else [*mixtures(rng, 20), *strongly_penalised(rng, 6)]
    small = Thresholds(prompt_logits_chunk=5)
    with simulated(seed, enforce_eager=eager, max_num_batched_tokens=24, thresholds=small, **changes) as (core, _, _):
        answers = run(core, batch)
        assert eager or core.stats().num_preemptions > 0
    tokens = close_calls = 0
    for each in batch:
        choices = CHOICES if each.automaton is not None or each.host_grammar is not None else None
        tally = oracle.judge(each, answers[each.request_id], choices)
        tokens, close_calls = tokens + tally.tokens, close_calls + tally.close_calls
    assert tokens > 3 * len(batch) and close_calls <= 1 + tokens // 50
