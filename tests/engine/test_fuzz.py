"""Thousands of random requests against a tiny KV pool: each ends with the right tokens or was aborted, and nothing leaks."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import pytest

from tests.engine.harness import Answer, MakeEngine, request, run
from tests.engine.tiny_grammars import LOOP, PATTERN, automaton
from tests.engine.tiny_llama import EOS, KV_BLOCK_BYTES

NUM_REQUESTS = 2000
POOL_BLOCKS = 20
CONTEXT = 128
EMPTIES_A_GRAMMAR = ("ignore_eos", "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words_ids")


def random_params(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters under which there is always a token to draw.

    ``allowed_token_ids`` that others might empty are left out after everything is drawn: seeds without any keep their
    scenario, and in one with some nothing else changes.
    """
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 14), "temperature": rng.choice([0.0, 0.0, 0.7, 1.5])}
    choices: list[dict[str, Any]] = [
        {"top_k": rng.randrange(1, 30)},
        {"top_p": rng.uniform(0.1, 1.0)},
        {"min_p": rng.uniform(0.0, 0.5)},
        {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)},
        {"repetition_penalty": rng.uniform(0.5, 2.0)},
        {"logit_bias": {rng.randrange(97): rng.uniform(-100, 100) for _ in range(rng.randrange(1, 5))}},
        {"allowed_token_ids": rng.sample(range(97), rng.randrange(1, 20))},
        {"bad_words_ids": [[rng.randrange(97) for _ in range(rng.randrange(1, 4))] for _ in range(3)]},
        {"min_tokens": rng.randrange(params["max_tokens"] + 1), "stop_token_ids": rng.sample(range(97), 10)},
        {"ignore_eos": True},
        {"logprobs": rng.randrange(0, 8)},
        {"prompt_logprobs": rng.randrange(0, 4)},
        {"logprob_token_ids": rng.sample(range(97), rng.randrange(1, 6))},
    ]
    for choice in rng.sample(choices, rng.randrange(0, 4)):
        params |= choice
    if "allowed_token_ids" in params and not certain_tokens(params):
        del params["allowed_token_ids"]
    return params


def certain_tokens(params: dict[str, Any]) -> set[int]:
    """What is left of ``allowed_token_ids`` whatever was drawn before."""
    ends: list[int] = []
    if params.get("min_tokens"):
        ends = params["stop_token_ids"] + ([] if params.get("ignore_eos") else EOS)
    return {*params["allowed_token_ids"]} - {*ends} - {words[-1] for words in params.get("bad_words_ids", ())}


def random_request(rng: random.Random, index: int) -> Any:
    length = rng.choice([1, 7, 8, 9, rng.randrange(1, 100)])
    shared = [(7 * i) % 97 for i in range(rng.choice([0, 8, 16, 40]))]
    prompt = (shared + [rng.randrange(97) for _ in range(length)])[:110]
    params = random_params(rng)
    if rng.random() < 0.25:
        params = {name: value for name, value in params.items() if name not in EMPTIES_A_GRAMMAR}
        params |= {
            "automaton": automaton("regex", rng.choice([PATTERN, LOOP])),
            "max_tokens": min(rng.randrange(1, 20), CONTEXT - len(prompt)),
        }
    return request(str(index), prompt, seed=rng.getrandbits(64), **params)


def test_random_demands_leave_a_token_to_draw() -> None:
    rng = random.Random(0)
    drawn = [random_params(rng) for _ in range(20_000)]
    asked = [params for params in drawn if "allowed_token_ids" in params]
    assert len(asked) > 1000 and all(certain_tokens(params) for params in asked)
    assert any(len(certain_tokens(params)) < len(params["allowed_token_ids"]) for params in asked)


@pytest.mark.parametrize(("depth", "seed"), [(0, 1), (2, 2), (4, 3)])
def test_random_requests(make_engine: MakeEngine, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    threads = threading.active_count()
    requests = [random_request(rng, i) for i in range(NUM_REQUESTS // 3 + 1)]
    expected = run_plain(make_engine, requests)
    core = make_engine(
        run_ahead=depth, max_num_batched_tokens=40, max_num_seqs=6, kv_cache_memory_bytes=POOL_BLOCKS * KV_BLOCK_BYTES
    )
    answers: dict[str, Answer] = {each.request_id: Answer() for each in requests}
    aborted: set[str] = set()
    waiting = list(requests)
    while waiting or core.has_work():
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2, 5]))):
            core.add(waiting.pop(0))
        if rng.random() < 0.05:
            victim = str(rng.randrange(len(requests) - len(waiting) or 1))
            if answers[victim].finish_reason is None:
                core.abort(victim)
                aborted.add(victim)
        for update in core.step():
            assert update.request_id not in aborted, "an update after the abort"
            answers[update.request_id].take(update)
    assert core.stats().num_preemptions > 0 and core.stats().prefix_cache_hits > 0 and aborted
    for request_id, answer in answers.items():
        if request_id in aborted:
            assert answer.token_ids == expected[request_id].token_ids[: len(answer.token_ids)]
            continue
        assert answer.error is None
        assert answer.token_ids == expected[request_id].token_ids, request_id
        assert answer.finish_reason == expected[request_id].finish_reason
        assert len(answer.prompt_logprobs) == len(expected[request_id].prompt_logprobs)
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    core.check_integrity()
    gc.collect()
    assert threading.active_count() == threads


def run_plain(make_engine: MakeEngine, requests: list[Any]) -> dict[str, Answer]:
    """What each request gives on the synchronous engine with memory to spare and no cache."""
    return run(make_engine(enable_prefix_caching=False), requests)
