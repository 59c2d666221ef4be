"""R2, R8: the same requests give the same answers at every run-ahead depth, for every sampling feature, alone and mixed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headway.core.config import EngineArgs
from tests.engine.harness import Answer, MakeEngine, request, run
from tests.engine.tiny_grammars import LARK, LOOP, PATTERN, SCHEMA, automaton, host_grammar
from tests.engine.tiny_llama import KV_BLOCK_BYTES

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "all_filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.2},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "logit_bias": {"logit_bias": {7: 5.0, 9: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [2, 3, 8, 40, 96]},
    "bad_words": {"temperature": 0.0, "bad_words_ids": [[11], [20, 21], [1, 2, 3]]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [1, 2, 4, 6, 8, 10]},
    "max_tokens": {"max_tokens": 1},
    "stop_token_ids": {"stop_token_ids": [1, 2, 4, 6, 8, 10, 20, 30, 40, 50, 60]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 20},
    "logprobs": {"logprobs": 5},
    "logprobs_zero": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "logprob_token_ids": {"logprob_token_ids": [1, 50, 96]},
    "pattern": {"automaton": automaton("regex", PATTERN), "temperature": 1.4, "max_tokens": 14},
    "schema": {"automaton": automaton("json", json.dumps(SCHEMA)), "temperature": 1.2, "max_tokens": 24, "top_k": 40},
    "pattern_mixed": {
        "automaton": automaton("regex", LOOP),
        "min_tokens": 5,
        "presence_penalty": 1.0,
        "bad_words_ids": [[60], [61, 62]],
        "logprobs": 3,
    },
    "host_grammar": {
        "host_grammar": host_grammar("grammar", LARK),
        "temperature": 1.3,
        "max_tokens": 12,
        "logprobs": 2,
    },
}


def close(left: Answer, right: Answer, tolerance: float = 1e-5) -> None:
    assert left.error is None and right.error is None
    assert left.token_ids == right.token_ids
    assert left.finish_reason == right.finish_reason
    assert left.stop_token_id == right.stop_token_id
    for mine, theirs in ((left.logprobs, right.logprobs), (left.prompt_logprobs, right.prompt_logprobs)):
        assert len(mine) == len(theirs)
        for (ids, values, rank), (other_ids, other_values, other_rank) in zip(mine, theirs, strict=True):
            assert (ids, rank) == (other_ids, other_rank)
            assert values == pytest.approx(other_values, abs=tolerance)


def requests_for(params: list[dict[str, Any]], seed: int) -> list[Any]:
    rng = random.Random(seed)
    return [
        request(f"r{i}", [rng.randrange(97) for _ in range(rng.randrange(1, 40))], seed=i, **dict(each))
        for i, each in enumerate(params)
    ]


@pytest.mark.parametrize("feature", FEATURES)
def test_one_feature_at_every_depth(make_engine: MakeEngine, feature: str) -> None:
    batch = requests_for([FEATURES[feature]] * 5, seed=1)
    oracle = run(make_engine(run_ahead=0), batch)
    assert all(answer.finish_reason for answer in oracle.values())
    for depth in (1, 2, 4):
        answers = run(make_engine(run_ahead=depth), batch)
        for request_id, answer in answers.items():
            close(answer, oracle[request_id])


@pytest.mark.parametrize("pool_blocks", [None, 18])
@pytest.mark.parametrize("depth", [1, 2, 4, "auto"])
def test_mixed_features_at_every_depth(make_engine: MakeEngine, depth: Any, pool_blocks: int | None) -> None:
    """More requests than slots, prompts longer than a step's budget, and (18 blocks) a pool that forces preemptions."""
    batch = requests_for(list(FEATURES.values()) * 2, seed=2)
    oracle = run(make_engine(run_ahead=0, enable_prefix_caching=False), batch)
    memory = {} if pool_blocks is None else {"kv_cache_memory_bytes": pool_blocks * KV_BLOCK_BYTES}
    core = make_engine(run_ahead=depth, max_num_batched_tokens=24, **memory)
    answers = run(core, batch)
    for request_id, answer in answers.items():
        close(answer, oracle[request_id])
    if pool_blocks is not None:
        assert core.stats().num_preemptions > 0, "the pool was meant to be too small"


def test_neighbours_do_not_change_tokens(make_engine: MakeEngine) -> None:
    batch = requests_for(list(FEATURES.values()), seed=3)
    together = run(make_engine(run_ahead=2), batch)
    for each in batch:
        alone = run(make_engine(run_ahead=2), [each])
        close(alone[each.request_id], together[each.request_id])


def test_auto_is_accepted_and_plain_on_a_synchronous_device(make_engine: MakeEngine) -> None:
    core = make_engine(run_ahead="auto")
    assert core.stats().run_ahead == 0
    assert EngineArgs(run_ahead="auto").run_ahead == "auto"
