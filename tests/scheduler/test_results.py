"""Ends, aborts and failures in every state a request can be in."""

from __future__ import annotations

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.core.messages import TokenLogprobsRow
from headway.core.plan import Finish, LogprobsResult, StepPlan, StepResult
from headway.scheduler import Scheduler
from headway.scheduler.results import logprobs_rows
from tests.scheduler.fake_device import make_request, predict
from tests.scheduler.loop import Loop, make_config


def answer(plan: StepPlan, tokens: list[int], finish: list[int] | None = None) -> StepResult:
    codes = np.array(finish or [0] * plan.num_rows, np.int32)
    return StepResult(plan.samples.astype(np.int32), np.array(tokens, np.int32)[:, None], codes)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("code", "reason", "stop"),
    [(Finish.EOS, "stop", None), (Finish.STOP_TOKEN, "stop", 8), (Finish.LENGTH, "length", None)],
)
def test_finish_codes_become_reasons(code: Finish, reason: str, stop: int | None) -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", [1, 2], 5))
    plan = planned(scheduler)
    (update,) = scheduler.apply(plan, answer(plan, [8], [code]))
    assert (update.finish_reason, update.stop_token_id, update.new_token_ids) == (reason, stop, [8])
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()


def test_zombie_rows_are_ignored_even_when_the_slot_has_a_new_owner() -> None:
    scheduler = Scheduler(make_config(max_num_seqs=1))
    scheduler.add(make_request("a", [1, 2], 9))
    first, zombie = planned(scheduler), planned(scheduler)
    scheduler.apply(first, answer(first, [3], [Finish.EOS]))
    scheduler.add(make_request("b", [4, 5], 9))
    newcomer = planned(scheduler)
    assert newcomer.slots.tolist() == zombie.slots.tolist()
    gone = StepResult(np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    assert scheduler.apply(zombie, gone) == []
    (update,) = scheduler.apply(newcomer, answer(newcomer, [7]))
    assert update.request_id == "b" and update.new_token_ids == [7]


def test_abort_while_waiting_running_in_flight_draining_and_unknown() -> None:
    loop = Loop(make_config(max_num_seqs=2), depth=3)
    loop.add(*(make_request(n, [1, 2, 4, 5, 6], 9, ignore_eos=True) for n in "abc"))
    loop.add(make_request("short", [1], 1))
    loop.launch()
    loop.launch()
    assert not loop.scheduler.abort("nobody")
    assert loop.scheduler.abort("c") and not loop.scheduler.abort("c")
    assert loop.scheduler.abort("a")
    loop.scheduler.check_integrity()
    assert loop.launch() is not None and loop.scheduler.abort("short")  # admitted and draining by now
    loop.finish()
    assert loop.updates["a"] == loop.updates["c"] == loop.updates["short"] == []
    assert loop.tokens("b") == predict(make_request("b", [1, 2, 4, 5, 6], 9, ignore_eos=True))[0]


def test_abort_while_preempted_with_rows_in_flight() -> None:
    loop = Loop(make_config(max_model_len=20, num_blocks=7), depth=3)
    loop.add(make_request("a", [1, 2, 4, 5, 6], 14, ignore_eos=True))
    loop.add(make_request("b", [7, 8, 9, 1, 2], 14, ignore_eos=True))
    while not loop.scheduler.stats().num_preemptions:
        loop.tick()
    assert loop.scheduler._life.waiting.head.in_flight > 0
    before = list(loop.updates["b"])
    assert loop.scheduler.abort("b")
    loop.finish()
    assert loop.updates["b"] == before and len(loop.tokens("a")) == 14


def test_a_preempted_request_may_turn_out_finished() -> None:
    scheduler = Scheduler(make_config(max_model_len=12, num_blocks=4, enable_prefix_caching=False))
    scheduler.add(make_request("a", [1, 2, 4, 5], 8))
    scheduler.add(make_request("b", [7, 8, 9], 5))
    first, second = planned(scheduler), planned(scheduler)
    assert (first.num_rows, second.num_rows) == (2, 2)
    third = planned(scheduler)  # "b" needs a second block: none is left
    while not scheduler.stats().num_preemptions:
        third = planned(scheduler)
    (_, b) = scheduler.apply(first, answer(first, [5, 5], [0, Finish.EOS]))
    assert b.request_id == "b" and b.finish_reason == "stop" and third.num_rows == 1
    assert scheduler.stats().num_waiting == 0
    scheduler.check_integrity()


def test_fail_ends_one_request_and_says_why() -> None:
    loop = Loop(make_config(), depth=2)
    loop.add(make_request("a", [1, 2], 5, ignore_eos=True), make_request("b", [1, 2], 5, ignore_eos=True))
    loop.launch()
    update = loop.scheduler.fail("a", "boom")
    assert update is not None and (update.finish_reason, update.error) == ("error", "boom")
    assert loop.scheduler.fail("a", "again") is None
    loop.finish()
    assert loop.updates["a"] == [] and len(loop.tokens("b")) == 5


def test_a_row_whose_logprobs_are_missing_fails_alone() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", [1, 2], 5, logprobs=1))
    scheduler.add(make_request("b", [1, 2], 5))
    plan = planned(scheduler)
    a, b = scheduler.apply(plan, answer(plan, [7, 8]))
    assert a.finish_reason == "error" and a.error and "log-probabilities" in a.error
    assert b.finish_reason is None and b.new_token_ids == [8]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_row_the_device_dropped_silently_fails_instead_of_hanging(max_tokens: int) -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", [1, 2], max_tokens))
    plan = planned(scheduler)
    nothing = StepResult(np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    (update,) = scheduler.apply(plan, nothing)
    assert update.finish_reason == "error" and not scheduler.has_unfinished()


def test_results_are_applied_in_order_and_once() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", [1, 2], 5))
    first, second = planned(scheduler), planned(scheduler)
    with pytest.raises(HeadwayError, match="oldest"):
        scheduler.apply(second, answer(second, [1]))
    scheduler.apply(first, answer(first, [1]))
    with pytest.raises(HeadwayError, match="oldest"):
        scheduler.apply(first, answer(first, [1]))


def test_counts_of_tokens() -> None:
    loop = Loop(make_config(), depth=2)
    loop.add(make_request("a", [1, 2, 4], 4, ignore_eos=True), make_request("b", [1], 2, ignore_eos=True))
    loop.finish()
    stats = loop.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_steps) == (4, 6, len(loop.device.log))


def test_a_step_that_was_not_launched_fails_its_requests_and_leaves_no_prefix_behind() -> None:
    loop = Loop(make_config(max_num_seqs=2), depth=2)
    prompt = [1, 2, 4, 5, 6, 7, 8, 9, 1]
    loop.add(make_request("a", prompt, 1), make_request("b", [7, 7], 5), make_request("c", prompt, 5, ignore_eos=True))
    lost = planned(loop.scheduler)
    updates = loop.scheduler.discard(lost, "no memory")
    assert [(u.request_id, u.finish_reason, u.error) for u in updates] == [
        ("a", "error", "no memory"),
        ("b", "error", "no memory"),
    ]
    loop.scheduler.check_integrity()
    plan = planned(loop.scheduler)
    assert plan.admissions[0].request.request_id == "c" and plan.admissions[0].num_computed == 0
    with pytest.raises(HeadwayError, match="newest"):
        loop.scheduler.discard(lost, "again")


@pytest.mark.parametrize("positions", [[0, 1, 2], [0, 2], [1], []])
def test_log_probabilities_of_positions_end_with_their_valid_entries(positions: list[int]) -> None:
    told = LogprobsResult(
        token_ids=np.array([[7, 8, 9], [4, 99, 99], [99, 99, 99]], np.int32),
        logprobs=np.array([[-0.5, -1.0, -2.0], [-0.25, 9.0, 9.0], [9.0, 9.0, 9.0]], np.float32),
        ranks=np.array([1, 3, 99], np.int32),
        counts=np.array([3, 1, 0], np.int32),
    )
    rows = [TokenLogprobsRow([7, 8, 9], [-0.5, -1.0, -2.0], 1), TokenLogprobsRow([4], [-0.25], 3), None]
    assert logprobs_rows(told, positions) == [rows[position] for position in positions]
