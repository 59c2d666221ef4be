"""Rows of drafts bring exactly the tokens, log-probabilities and ends that plain decoding brings, in fewer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headway.core.messages import AddRequest, StepUpdates
from headway.core.plan import StepPlan, StepResult
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.engine.draft_pacer import DraftPacer
from tests.engine.forced_drafts import Pattern, forced
from tests.engine.harness import Answer, run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_grammars import VOCABULARY
from tests.engine.tiny_llama import KV_BLOCK_BYTES
from tests.sim.harness import arguments, expected, simulated
from tests.sim.rounding import TOLERANCE

PATTERNS: tuple[Pattern, ...] = ("all", "none", "random")


def compare(answers: dict[str, Answer], oracle: dict[str, Answer]) -> None:
    """Batches have other shapes here than on the oracle, so sums are rounded otherwise."""
    assert answers.keys() == oracle.keys()
    for request_id, answer in answers.items():
        try:
            close(answer, oracle[request_id], TOLERANCE)
        except AssertionError as error:
            error.add_note(request_id)
            raise


def on_cpu(requests: list[AddRequest], number: int, pattern: Pattern, depth: int, **sizes: Any) -> EngineCore:
    """An engine on the CPU that guesses the requests' answers."""
    args = arguments({"device": "cpu", "run_ahead": depth, **sizes})
    core = build_engine(args, progress=False, drafts=forced(requests, expected(requests), number, pattern))
    core.learn(VOCABULARY)
    return core


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_feature_mixed(number: int, pattern: Pattern) -> None:
    """More requests than slots, and chunks; depths by turns."""
    batch = requests_for(list(FEATURES.values()), seed=5)
    core = on_cpu(batch, number, pattern, (4, 0, 1, 2)[number - 1], max_num_batched_tokens=48)
    compare(run(core, batch), expected(batch))
    core.check_integrity()
    core.shutdown()


@pytest.mark.parametrize(("number", "depth"), [(1, 1), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_preemptions(number: int, depth: int, pattern: Pattern) -> None:
    batch = requests_for(list(FEATURES.values()), seed=6)
    sizes = {"kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES, "max_num_batched_tokens": 72, "max_model_len": 120}
    core = on_cpu(batch, number, pattern, depth, **sizes)
    compare(run(core, batch), expected(batch))
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    core.shutdown()


def test_accepted_drafts_save_steps_and_rejected_ones_cost_none() -> None:
    batch = requests_for([{"temperature": 0.0, "ignore_eos": True, "max_tokens": 41}] * 2, seed=7)
    steps = {}
    for pattern in PATTERNS:
        core = on_cpu(batch, 3, pattern, 0)
        compare(run(core, batch), expected(batch))
        steps[pattern] = core.stats().num_steps
        core.shutdown()
    assert steps["all"] == 1 + 10 and steps["none"] == 41 and 11 < steps["random"] < 41


@pytest.mark.parametrize("depth", [0, 2])
def test_the_width_may_change_from_step_to_step(depth: int) -> None:
    """As it will with the load; rows stay the same meanwhile, and what the device has of them does not."""
    batch = requests_for([FEATURES[name] for name in ("greedy", "presence", "ignore_eos", "logprobs")], seed=11)
    core = on_cpu(batch, 3, "random", depth)
    for each in batch:
        core.add(each)
    answers = {each.request_id: Answer() for each in batch}
    turn = 0
    while core.has_work():
        core._scheduler.width = (1, 1, 4, 4, 2)[turn % 5] if depth == 0 else (1, 4, 4)[turn % 3]
        turn += 1
        for update in core.step():
            answers[update.request_id].take(update)
    compare(answers, expected(batch))
    with pytest.raises(ValueError, match="1 to 4"):
        core._scheduler.width = 5
    core.shutdown()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_may_opt_out_beside_others_that_draft(depth: int) -> None:
    """Its row brings a token a step and is no draft's; its neighbour goes on as it would alone."""
    long = {"temperature": 0.7, "ignore_eos": True, "max_tokens": 41}
    batch = requests_for([long, long | {"disable_spec_decode": True}], seed=7)
    core = on_cpu(batch, 3, "all", depth)
    compare(run(core, batch), expected(batch))
    stats = core.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 30, 30)
    assert 41 <= stats.num_steps <= 41 + depth
    core.check_integrity()
    core.shutdown()


def test_steps_without_a_draft_are_narrow() -> None:
    """Where every request opts out, or waits for a grammar on the host, no decode step has room for drafts. Steps with prompts
    have it all the same: at another width their kernels would be loaded, or compiled, when the first of them comes."""
    asked = [FEATURES["greedy"] | {"disable_spec_decode": True}, FEATURES["host_grammar"]]
    batch = requests_for(asked, seed=12)
    core = on_cpu(batch, 3, "all", 1)
    widths, launch = set[tuple[bool, int]](), core._runner.launch

    def noted(plan: Any, limit: Any = None) -> Any:
        widths.add((plan.num_decode_rows < plan.num_rows, plan.width))
        return launch(plan, limit)

    core._runner.launch = noted  # type: ignore[method-assign]
    compare(run(core, batch), expected(batch))
    assert widths == {(False, 1), (True, 4)} and core.stats().num_drafts == 0
    core.shutdown()


def test_the_pacer_hears_of_every_step_and_of_times_without_prompts() -> None:
    """What a step took says nothing of its decode rows where prompts ran beside them."""
    heard: list[float | None] = []
    plans: list[StepPlan] = []

    class Listener(DraftPacer):
        def observe(self, width: int, reached: Sequence[int], step_us: float | None) -> int:
            assert width == plans[-1].width and len(reached) == width
            heard.append(step_us)
            return 3

    batch = requests_for(list(FEATURES.values()), seed=7)
    core = on_cpu(batch, 2, "random", 1, max_num_batched_tokens=32)
    core._draft_pacer, apply = Listener((1, 3)), core._scheduler.apply

    def applied(plan: StepPlan, result: StepResult) -> StepUpdates:
        plans.append(plan)
        return apply(plan, result)

    core._scheduler.apply = applied  # type: ignore[method-assign]
    run(core, batch)
    core.shutdown()
    assert [each is None for each in heard] == [plan.num_rows > plan.num_decode_rows for plan in plans]
    assert 0 < heard.count(None) < len(heard) and any(
        plan.num_decode_rows for plan, t in zip(plans, heard) if t is None
    )


def test_a_row_stops_inside_a_run() -> None:
    """A stop token, the length and the end of the context, each with accepted drafts behind it."""
    plain = requests_for([{"temperature": 0.0, "ignore_eos": True, "max_tokens": 30}], seed=8)
    answer = expected(plain)["r0"].token_ids
    for stop in range(2, 9):
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0, "ignore_eos": True, "max_tokens": stop},
            {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30, "stop_token_ids": [answer[stop]]},
        ]
        for params in kinds:
            batch = requests_for([params], seed=8)
            truth = {"r0": expected(plain)["r0"]}
            args = arguments({"device": "cpu", "run_ahead": 2})
            core = build_engine(args, progress=False, drafts=forced(batch, truth, 4, "all"))
            found = run(core, batch)["r0"]
            compare({"r0": found}, expected(batch))
            assert core.stats().generation_tokens == len(found.token_ids)
            core.shutdown()


NAMES = list(FEATURES)
SOME = (["greedy", "presence", "logprobs", "host_grammar"], ["schema", "min_tokens", "top_p", "bad_words"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "depth", "pattern", "graphs"),
    [
        pytest.param(*each, graphs, marks=() if graphs == each[0] % 2 else pytest.mark.soak)
        for each in [(1, 1, "all"), (2, 2, "random"), (3, 4, "random"), (4, 0, "none")]
        for graphs in (True, False)
    ],
)
def test_every_feature_on_the_simulated_device(number: int, depth: int, pattern: Pattern, graphs: bool) -> None:
    simulate(NAMES, number, depth, pattern, graphs)


@pytest.mark.parametrize(
    ("number", "depth", "pattern", "graphs", "names"),
    [(1, 1, "random", True, SOME[0]), (3, 2, "random", True, SOME[1]), (4, 4, "all", False, SOME[0])],
)
def test_some_features_on_the_simulated_device(
    number: int, depth: int, pattern: Pattern, graphs: bool, names: list[str]
) -> None:
    simulate(names * 2, number, depth, pattern, graphs)


def simulate(names: list[str], number: int, depth: int, pattern: Pattern, graphs: bool) -> None:
    """In a small pool, with everything checked that the device can check."""
    batch = requests_for([FEATURES[name] for name in names], seed=9)
    drafts = forced(batch, expected(batch), number, pattern)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 24} | {"kv_cache_memory_bytes": 18 * KV_BLOCK_BYTES}
    with simulated(40 + number, drafts=drafts, run_ahead=depth, enforce_eager=not graphs, **sizes) as (core, _, watch):
        compare(run(core, batch), expected(batch))
        assert watch.num_steps == core.stats().num_steps > 0
        assert (core.stats().num_graph_steps > 0) == graphs and (len(names) < 9 or core.stats().num_preemptions > 0)
