"""Drafts judged by probabilities: tokens are distributed as without drafts. By numbers that seeds fix, so nothing can flake."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.core.messages import AddRequest
from headway.core.speculative import SpeculativeConfig
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from tests.engine.harness import Answer, request, run
from tests.engine.test_depths import FEATURES, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import arguments, expected, simulated
from tests.speculative.test_draft_model import stranger

PROMPT = [5, 17, 3, 60, 21]


def drafting(number: int, how: str | None = "probabilistic") -> dict[str, Any]:
    config = {"method": "draft_model", "model": stranger(), "num_speculative_tokens": number}
    return {"speculative_config": config | {"draft_sample_method": how, "adaptive": False}}


def on_cpu(**sizes: Any) -> EngineCore:
    core = build_engine(arguments({"device": "cpu", "max_num_batched_tokens": 72} | sizes), progress=False)
    core.learn(VOCABULARY)
    return core


def probabilities(core: EngineCore, text: list[int], params: dict[str, Any]) -> dict[int, float]:
    """Of the next token, as temperature and top_k leave them: from log-probabilities that the plain engine tells."""
    asked = request("", text, temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=params["top_k"])
    ids, logprobs, _ = run(core, [asked])[""].logprobs[0]
    weights = {token: math.exp(each / params["temperature"]) for token, each in zip(ids, logprobs, strict=True)}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize(("number", "top_k", "depth"), [(2, 4, 2), (1, 3, 0)])
def test_three_tokens_are_distributed_as_the_model_says(number: int, top_k: int, depth: int) -> None:
    """The first is drawn, the others are drafted, the last one at times behind a rejection. The drafter's ``top_k`` tokens are
    others than the model's."""
    params: dict[str, Any] = {"temperature": 2.0, "top_k": top_k, "max_tokens": 3, "ignore_eos": True}
    plain = on_cpu()
    truth: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        steps = [(text, probabilities(plain, [*PROMPT, *text], params).items()) for text in truth]
        truth = {(*text, token): truth[text] * chance for text, likely in steps for token, chance in likely}
    plain.shutdown()
    size = 2000
    core = on_cpu(run_ahead=depth, max_num_seqs=64, max_num_batched_tokens=1024, **drafting(number))
    answers = run(core, [request(f"r{seed}", PROMPT, seed=seed, **params) for seed in range(size)])
    stats = core.stats()
    core.shutdown()
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95, "some are accepted, and some are not"
    found = Counter(tuple(answer.token_ids) for answer in answers.values())
    assert found.keys() <= truth.keys()
    cells = {text: chance for text, chance in truth.items() if chance * size >= 3}
    rest = 1 - sum(cells.values())
    pairs = [(found[text], chance * size) for text, chance in cells.items()]
    if rest * size >= 3:
        pairs.append((sum(count for text, count in found.items() if text not in cells), rest * size))
    chi = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    degrees = len(pairs) - 1
    assert degrees >= 15
    assert chi < degrees + 3.1 * math.sqrt(2 * degrees), f"{chi:.0f} of {degrees} degrees"


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


def test_a_seed_has_its_tokens_whatever_depth_and_neighbours() -> None:
    params: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 24}
    batch = [request(f"r{i}", [*PROMPT, i], seed=i, **params) for i in range(12)]
    found = []
    for depth, some, slots in ((0, batch, 8), (2, batch, 8), (4, batch[1:], 1)):
        core = on_cpu(run_ahead=depth, max_num_seqs=slots, **drafting(3))
        found.append(tokens(run(core, some)))
        core.shutdown()
    assert found[0] == found[1]
    assert found[2] == {name: found[0][name] for name in found[2]}, "what the slot held before makes no difference"
    assert found[0] != tokens(expected(batch)), "they are other tokens than without drafts"


def obeys(each: AddRequest, answer: Answer, truth: Answer) -> None:
    """What can be said of any answer, and all of those that chance has no part in."""
    params, made = each.params, answer.token_ids
    assert answer.error is None and params.max_tokens is not None
    assert params.min_tokens <= len(made) <= params.max_tokens
    assert answer.finish_reason == (
        "length" if len(made) == params.max_tokens and answer.stop_token_id is None else "stop"
    ) or (len(made) == params.max_tokens)
    if params.temperature == 0.0:
        assert made == truth.token_ids and answer.finish_reason == truth.finish_reason
    if params.allowed_token_ids:
        assert set(made) <= set(params.allowed_token_ids)
    for banned in each.bad_words_token_ids:
        assert all(made[i : i + len(banned)] != banned for i in range(len(made)))
    if params.logprobs is not None or params.logprob_token_ids:
        assert [ids[0] for ids, _, _ in answer.logprobs] == made
    assert len(answer.prompt_logprobs) == len(truth.prompt_logprobs)


@pytest.mark.parametrize(("number", "depth"), [(3, 2)])
def test_every_feature(number: int, depth: int) -> None:
    batch = requests_for(list(FEATURES.values()), seed=80 + number)
    memory = {"kv_cache_memory_bytes": 22 * 2 * KV_BLOCK_BYTES}
    core = on_cpu(run_ahead=depth, **drafting(number), **memory)
    answers, truth = run(core, batch), expected(batch)
    for each in batch:
        obeys(each, answers[each.request_id], truth[each.request_id])
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize("left", [{"top_k": 1}, {"min_p": 1.0}], ids=["top_k", "min_p"])
def test_where_one_token_is_left_it_is_drawn(left: dict[str, Any]) -> None:
    """Whatever else a request asks for: so each of its wishes takes part where drafts are judged."""
    batch = requests_for(list(FEATURES.values()), seed=95)
    for each in batch:
        each.params = replace(each.params, **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **left})
    core = on_cpu(run_ahead=1, **drafting(2))
    assert tokens(run(core, batch)) == tokens(expected(batch))
    assert core.stats().num_accepted_tokens > 0
    core.shutdown()


def test_on_the_simulated_device() -> None:
    names = ("temperature", "schema", "presence")
    batch = requests_for([FEATURES[name] for name in names], seed=90)
    sizes = {
        "max_num_seqs": 2,
        "enforce_eager": True,
        "max_num_batched_tokens": 24,
        "kv_cache_memory_bytes": 22 * 2 * KV_BLOCK_BYTES,
    }
    with simulated(3, run_ahead=2, **drafting(2), **sizes) as (core, _, _):
        answers, truth = run(core, batch), expected(batch)
        for each in batch:
            obeys(each, answers[each.request_id], truth[each.request_id])


def test_padding_of_graphs_draws_for_nobody() -> None:
    """Three rows in graphs of four: what the fourth one makes lands in no slot that a request has."""
    batch = [request(f"r{i}", [*PROMPT, i], seed=i, temperature=1.0, ignore_eos=True, max_tokens=10) for i in range(3)]
    core = on_cpu(max_num_seqs=4, **drafting(2))
    alone = tokens(run(core, batch))
    core.shutdown()
    with simulated(1, run_ahead=1, max_num_seqs=4, enforce_eager=False, **drafting(2)) as (core, _, _):
        assert tokens(run(core, batch)) == alone
        assert core.stats().num_graph_steps > 0


def test_the_most_likely_drafts_change_no_token() -> None:
    batch = requests_for([FEATURES[name] for name in ("greedy", "temperature", "top_p")], seed=91)
    core = on_cpu(run_ahead=1, **drafting(2, "greedy"))
    assert tokens(run(core, batch)) == tokens(expected(batch))
    core.shutdown()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"draft_sample_method": "gumbel"}, "must be one of greedy, probabilistic"),
        ({"draft_sample_method": "probabilistic", "adaptive": True}, "leave adaptive out"),
        ({"draft_sample_method": "greedy", "method": "ngram", "model": None}, "has no model, so drafts are not drawn"),
        (
            {
                "draft_sample_method": "probabilistic",
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2.0,
            },
            "needs rejection_sample_method='standard'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SpeculativeConfig(**{"method": "draft_model", "model": "m", "num_speculative_tokens": 2, **given})
    probabilistic = SpeculativeConfig(
        method="draft_model", model="m", num_speculative_tokens=2, draft_sample_method="probabilistic"
    )
    assert not probabilistic.is_adaptive
