"""Every kind of sampling, greedy and drawn, against an oracle that shares no code with the engine (``tests.engine.oracle``)."""

from __future__ import annotations

import ast
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.api.inputs import Door
from headway.core.config import Thresholds
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from tests.engine.demands import CHOICES, alone, mixtures, strongly_penalised, with_phrases
from tests.engine.harness import Answer, MakeEngine, request, run
from tests.engine.naive import NaiveLlama
from tests.engine.oracle import Reals, SamplingOracle, Tally, judge_token, log_exponentials
from tests.engine.tiny_grammars import TOKENS
from tests.engine.tiny_llama import EOS, KV_BLOCK_BYTES, VOCAB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> SamplingOracle:
    naive = NaiveLlama(tiny_model)
    return SamplingOracle(lambda tokens: naive.logits(tokens).double().numpy(), TOKENS)


def judge_all(oracle: SamplingOracle, batch: list[AddRequest], answers: dict[str, Answer]) -> None:
    """All answers; few may be close calls, or the oracle would be no judge."""
    total = Tally()
    for each in batch:
        choices = CHOICES if each.automaton is not None or each.host_grammar is not None else None
        tally = oracle.judge(each, answers[each.request_id], choices)
        total.tokens, total.close_calls = total.tokens + tally.tokens, total.close_calls + tally.close_calls
    assert total.tokens > 3 * len(batch) and total.close_calls <= 1 + total.tokens // 50, total


def test_each_kind_alone(make_engine: MakeEngine, oracle: SamplingOracle) -> None:
    batch = alone(random.Random(1))
    core = make_engine(max_num_seqs=1, enable_prefix_caching=False)  # no neighbour whose needs would cover a row's own
    judge_all(oracle, batch, run(core, batch))


@pytest.mark.parametrize(
    ("depth", "seed", "memory"), [(0, 2, 400), (2, 3, 400), (3, 4, 18)], ids=["plain", "ahead", "preempted"]
)
def test_mixtures(make_engine: MakeEngine, oracle: SamplingOracle, depth: int, seed: int, memory: int) -> None:
    batch = [*mixtures(random.Random(seed), 45), *strongly_penalised(random.Random(seed), 6)]
    small = Thresholds(prompt_logits_chunk=5, headroom_divisor=100 if memory < 50 else 6)
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": memory * KV_BLOCK_BYTES}
    core = make_engine(run_ahead=depth, thresholds=small, **sizes)
    answers = run(core, batch)
    judge_all(oracle, batch, answers)
    assert (core.stats().num_preemptions > 0) == (memory < 50)
    again = [with_phrases(each, answers[each.request_id].token_ids) for each in batch if not each.automaton][:25]
    again = [each for each in again if each.params.allowed_token_ids is None and each.bad_words_token_ids]
    judge_all(oracle, again, run(core, again))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_phrases_of_one_length_alone(make_engine: MakeEngine, oracle: SamplingOracle, length: int) -> None:
    core = make_engine(run_ahead=2)
    first = [request(str(i), [i, 7 * i % VOCAB, 60], seed=i, temperature=0.0, ignore_eos=True) for i in range(6)]
    said = run(core, first)
    again = [with_phrases(each, said[each.request_id].token_ids, (length,)) for each in first]
    answers = run(core, again)
    judge_all(oracle, again, answers)
    assert all(answers[f"{each.request_id}-again"].token_ids != said[each.request_id].token_ids for each in first)


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=str)
def test_limits_of_filters_are_greedy_however_hot(make_engine: MakeEngine, limit: dict[str, Any]) -> None:
    core = make_engine(max_num_seqs=4)
    prompts = [[i, 3 * i % VOCAB, 50 + i] for i in range(4)]
    greedy = [request(f"g{i}", prompt, temperature=0.0) for i, prompt in enumerate(prompts)]
    hot = [request(f"h{i}", prompt, seed=9 + i, temperature=100.0, **limit) for i, prompt in enumerate(prompts)]
    wanted, found = run(core, greedy), run(core, hot)
    assert [found[f"h{i}"].token_ids for i in range(4)] == [wanted[f"g{i}"].token_ids for i in range(4)]


def test_hot_answers_vary_by_position_and_seed(make_engine: MakeEngine) -> None:
    """At 100 degrees tokens are nearly equally likely, so what repeats does so because the draw does."""
    batch = [request(str(i), [60], seed=i, temperature=100.0, ignore_eos=True, max_tokens=100) for i in range(4)]
    answers = [answer.token_ids for answer in run(make_engine(), batch).values()]
    assert all(len(set(tokens)) > 50 and max(Counter(tokens).values()) < 8 for tokens in answers)
    assert len({tuple(tokens[:4]) for tokens in answers}) == 4


def test_draws_follow_the_distribution(make_engine: MakeEngine, oracle: SamplingOracle, tiny_model: Path) -> None:
    """Of many seeds the first tokens are as frequent as the softmax says: the documented hash would not help if it were bad."""
    count, prompt = 1500, [60, 2, 41]
    core = make_engine(max_num_seqs=64, max_num_batched_tokens=192)
    batch = [request(str(i), prompt, seed=i * 2**33 + i, temperature=0.9, max_tokens=1) for i in range(count)]
    drawn = Counter(answer.token_ids[0] for answer in run(core, batch).values())
    raw = NaiveLlama(tiny_model).logits(prompt)[-1].double().numpy() / 0.9
    share = np.exp(raw - raw.max())
    share /= share.sum()
    common = [token for token in range(VOCAB) if count * share[token] > 8]
    chi = sum((drawn[token] - count * share[token]) ** 2 / (count * share[token]) for token in common)
    assert len(common) > 5 and chi < len(common) + 5 * (2 * len(common)) ** 0.5


def test_nearly_every_id_ends(make_engine: MakeEngine, oracle: SamplingOracle) -> None:
    stops = [token for token in range(VOCAB) if token not in EOS][-64:]
    batch = [
        request(f"{i}-{least}", [i, 20, 9], seed=i, temperature=2.0, stop_token_ids=stops, min_tokens=least)
        for i in range(8)
        for least in (0, 1, 4)
    ]
    answers = run(make_engine(run_ahead=2), batch)
    judge_all(oracle, batch, answers)
    assert {answer.stop_token_id for answer in answers.values()} & {*stops[-8:]}


def test_completions_of_a_prompt_have_the_documented_seeds(make_engine: MakeEngine, oracle: SamplingOracle) -> None:
    core = make_engine()
    for seed in (5, 2**64 - 1 - 2**64, 2**63 - 1):
        params = SamplingParams(n=4, seed=seed, temperature=3.0, detokenize=False, prompt_logprobs=1)
        children = Door(core.info, None).prepare([9, 8, 7, 60], params).children
        answers = run(core, children)
        for number, child in enumerate(children):
            child.seed = (seed + number) % 2**64
            if number:
                child.params.prompt_logprobs = None  # one completion reports on the prompt for all
            oracle.judge(child, answers[child.request_id])


def test_the_oracle_shares_nothing() -> None:
    for name in ("oracle.py", "naive.py"):
        tree = ast.parse((ROOT / "tests" / "engine" / name).read_text())
        named = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        ours = {module for module in named if module.startswith("headway")}
        assert ours <= {"headway.core.messages", "headway.core.params", "headway.core.automaton"}, name


def test_the_oracle_can_say_no() -> None:
    """A second token of the race, a token outside of the filters, and one that is less likely."""
    x: Reals = np.linspace(0.0, 3.0, 50)
    drawn = request("d", [1], seed=7, temperature=1.0, top_k=10)
    score = x - log_exponentials(7, 4, 50)
    order = [token for token in np.argsort(-score).tolist() if token >= 40]
    assert not judge_token(x, order[0], drawn, 4)
    for wrong in (order[1], 10):
        with pytest.raises(AssertionError):
            judge_token(x, wrong, drawn, 4)
    with pytest.raises(AssertionError, match="most likely"):
        judge_token(x, 48, request("g", [1], temperature=0.0), 4)
