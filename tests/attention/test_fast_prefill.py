"""What upper layers that cache nothing leave out of prompts changes no answer: engines with and without it, over chunks, beside
rows that decode, that draft, and that ask for the log-probabilities of their prompts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headway.core.messages import AddRequest
from headway.core.switches import FAST_PREFILL
from headway.state.batch import StepBatch
from tests.attention.test_kinds import NGRAM, arguments, engine, prompts
from tests.engine.harness import Answer, request, run
from tests.sim.harness import simulated

KINDS = ("gemma3n", "gemma4")


def asked() -> list[AddRequest]:
    """Every third asks for its prompt's log-probabilities, all for their tokens'."""
    return [
        request(
            f"r{n}", prompt, seed=n, temperature=1.1 if n % 4 == 3 else 0.0, max_tokens=5 + n, ignore_eos=True, logprobs=3,
            **({"prompt_logprobs": 2} if n % 3 == 1 else {}),
        )
        for n, prompt in enumerate(prompts())
    ]  # fmt: skip


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was narrowed."""
    found: list[int] = []
    own = StepBatch.of_last_tokens

    def of_last_tokens(batch: StepBatch) -> StepBatch:
        found.append(len(batch.row_slots))
        return own(batch)

    monkeypatch.setattr(StepBatch, "of_last_tokens", of_last_tokens)
    return found


def named(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """Requests that the log says turn it off since this was asked last, and the layers that run on all of their tokens."""
    lines = [
        re.search(r"request (\S+) asks for prompt_logprobs: .* upper (\d+) layers", each) for each in caplog.messages
    ]
    caplog.clear()
    return {line[1]: int(line[2]) for line in lines if line is not None}


def same(found: dict[str, Answer], wanted: dict[str, Answer]) -> None:
    for key, answer in wanted.items():
        assert found[key].token_ids == answer.token_ids, key
        for mine, theirs in (
            (found[key].logprobs, answer.logprobs),
            (found[key].prompt_logprobs, answer.prompt_logprobs),
        ):
            assert len(mine) == len(theirs)
            for (ids, values, rank), (wanted_ids, wanted_values, wanted_rank) in zip(mine, theirs, strict=True):
                assert (ids, rank) == (wanted_ids, wanted_rank), key
                assert values == pytest.approx(wanted_values, abs=1e-4), key


@pytest.mark.parametrize("name", KINDS)
def test_it_changes_no_answer(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whole prompts without it; then with it steps of 40 and 23 tokens, drafts, and the simulated device two steps ahead. The
    log names each request that turns it off, and only where there is something to turn off."""
    narrowed = counted(monkeypatch)
    with monkeypatch.context() as without:
        without.setenv(FAST_PREFILL, "0")
        core = engine(name, max_num_batched_tokens=128)
        wanted = run(core, asked())
        core.shutdown()
    assert not narrowed and not named(caplog)
    assert [len(answer.prompt_logprobs) for answer in wanted.values()] == [
        len(prompt) - 1 if n % 3 == 1 else 0 for n, prompt in enumerate(prompts())
    ]
    others: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 23}, {"speculative_config": NGRAM}]
    for changes in others:
        core = engine(name, **changes)
        same(run(core, asked()), wanted)
        assert named(caplog) == {f"r{n}": core._runner.executor.body.model.spec.narrow_layers for n in (1, 4)}
        core.shutdown()
        assert bool(narrowed) == ("speculative_config" not in changes), "steps whose rows draft run whole"
        narrowed.clear()
    with simulated(4, **arguments(name, run_ahead=2, max_num_batched_tokens=23)) as (core, _, _):
        for _ in range(2):  # the second time prompts are cached, where nothing is asked of them
            same(run(core, asked()), wanted)
    assert narrowed
