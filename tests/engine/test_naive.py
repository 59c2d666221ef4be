"""The engine says what the definitions say: every feature, greedily, against a generator that shares nothing with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.harness import MakeEngine, request, run
from tests.engine.naive import NaiveLlama
from tests.engine.test_depths import FEATURES, close, requests_for

COMBINED: list[dict[str, Any]] = [
    {"logprobs": 3, "logit_bias": {4: 30.0, 8: -100.0}},
    {"logprobs": 2, "allowed_token_ids": [2, 3, 8, 40, 96], "presence_penalty": 1.0, "prompt_logprobs": 2},
    {"logprob_token_ids": [1, 2], "repetition_penalty": 1.5, "frequency_penalty": 0.5, "bad_words_ids": [[7], [8, 9]]},
    {"logprobs": 1, "min_tokens": 6, "stop_token_ids": list(range(0, 97, 2))},
]
"""Edits and log-probabilities together: the latter are of the logits before any edit."""


def test_every_feature(make_engine: MakeEngine, tiny_model: Path) -> None:
    naive = NaiveLlama(tiny_model)
    known = [params for params in (*FEATURES.values(), *COMBINED) if "host_grammar" not in params]
    batch = requests_for([params | {"temperature": 0.0} for params in known], seed=5)
    answers = {each.request_id: naive.answer(each) for each in batch}
    for depth in (0, 2):
        for request_id, answer in run(make_engine(run_ahead=depth), batch).items():
            close(answer, answers[request_id], tolerance=1e-4)
    reasons = {answer.finish_reason for answer in answers.values()}
    assert reasons == {"stop", "length"} and any(answer.stop_token_id is not None for answer in answers.values())


def test_bad_words_do_not_reach_into_the_prompt(make_engine: MakeEngine, tiny_model: Path) -> None:
    naive, prompt = NaiveLlama(tiny_model), [5, 9, 60, 11]
    first = naive.answer(request("a", prompt, temperature=0.0)).token_ids[0]
    asked = request("b", prompt, temperature=0.0, bad_words_ids=[[prompt[-1], first]])
    answer = run(make_engine(run_ahead=2), [asked])["b"]
    assert answer.token_ids[0] == first
    close(answer, naive.answer(asked), tolerance=1e-4)
