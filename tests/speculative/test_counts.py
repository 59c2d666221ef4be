"""What is counted of drafts, and acceptance by a rate instead of by the tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headway.engine.boot import build_engine
from tests.engine.forced_drafts import forced
from tests.engine.harness import run
from tests.engine.test_depths import requests_for
from tests.sim.harness import arguments, expected, simulated

LONG = {"temperature": 0.7, "ignore_eos": True, "max_tokens": 41}


@pytest.mark.parametrize("depth", [0, 2])
def test_drafts_are_counted_by_their_place(depth: int) -> None:
    batch = requests_for([LONG] * 2, seed=7)
    found = {}
    for pattern in ("all", "none"):
        drafts = forced(batch, expected(batch), 3, pattern)
        core = build_engine(arguments({"device": "cpu", "run_ahead": depth}), progress=False, drafts=drafts)
        run(core, batch)
        stats = core.stats()
        found[pattern] = (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens_per_pos)
        assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
        assert stats.generation_tokens == 82 == 2 + stats.num_drafts + stats.num_accepted_tokens
        core.shutdown()
    assert found["all"] == (20, 60, [20, 20, 20]) and found["none"] == (80, 240, [0, 0, 0])


def test_rows_of_requests_that_have_ended_do_not_count() -> None:
    """A stop token ends the request while further steps with its row are on their way."""
    plain = requests_for([{"temperature": 0.0, "ignore_eos": True, "max_tokens": 30}], seed=8)
    stop = expected(plain)["r0"].token_ids[7]
    batch = requests_for([{"temperature": 0.0, "max_tokens": 30, "stop_token_ids": [stop]}], seed=8)
    core = build_engine(
        arguments({"device": "cpu", "run_ahead": 4}), progress=False, drafts=forced(batch, expected(batch), 2, "none")
    )
    answer = run(core, batch)["r0"]
    stats = core.stats()
    assert answer.finish_reason == "stop" and stats.num_steps > len(answer.token_ids), "rows came too late"
    assert stats.num_drafts == len(answer.token_ids) - 1
    core.shutdown()


@pytest.mark.parametrize("length", [1, 2.5])
def test_synthetic_acceptance_has_the_length_it_was_told(length: float, caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic"}
    batch = requests_for([LONG | {"max_tokens": 40}] * 3, seed=3)
    with caplog.at_level(logging.WARNING):
        sizes = {"max_num_batched_tokens": 72, "speculative_config": config | {"synthetic_acceptance_length": length}}
        with simulated(3, run_ahead=2, **sizes) as (core, _, _):
            answers = run(core, batch)
            stats = core.stats()
    assert "SYNTHETIC" in caplog.text
    assert all(len(answer.token_ids) == 40 and answer.finish_reason == "length" for answer in answers.values())
    mean = 1 + stats.num_accepted_tokens / stats.num_drafts
    assert mean == pytest.approx(length, rel=0.15), "the last row of each answer is cut short"
