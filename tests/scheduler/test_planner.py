"""What one plan holds: budgets, order of rows, chunks, admissions, preemption."""

from __future__ import annotations

import numpy as np
import pytest

from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.plan import StepPlan
from headway.scheduler import Scheduler
from tests.scheduler.fake_device import make_request, predict
from tests.scheduler.loop import Loop, make_config


def owners(plan: StepPlan | None) -> list[str]:
    assert plan is not None
    return [r.request_id for r in plan.owners]  # type: ignore[attr-defined]


def test_a_prompt_longer_than_the_budget_runs_in_chunks() -> None:
    loop = Loop(make_config(max_num_batched_tokens=5), depth=2)
    loop.add(make_request("a", [*range(10), 1, 2], 3, ignore_eos=True))
    plans = [loop.launch() for _ in range(4)]
    assert [p.query_lens.tolist() for p in plans if p] == [[5], [5], [2], [1]]
    assert [p.starts_bound.tolist() for p in plans if p] == [[0], [5], [10], [12]]
    assert [p.samples.tolist() for p in plans if p] == [[False], [False], [True], [True]]
    assert [p.num_decode_rows for p in plans if p] == [0, 0, 0, 1]


def test_decode_rows_come_first_and_leave_the_rest_of_the_budget_to_a_chunk() -> None:
    loop = Loop(make_config(max_num_batched_tokens=6))
    loop.add(make_request("a", [1, 2], 9, ignore_eos=True), make_request("b", list(range(11)), 9, ignore_eos=True))
    assert owners(loop.tick()) == ["a", "b"]
    plan = loop.tick()
    assert owners(plan) == ["a", "b"] and plan is not None
    assert plan.query_lens.tolist() == [1, 5] and plan.num_decode_rows == 1


def test_steps_with_prompts_have_the_widest_rows_whatever_the_width_of_the_moment() -> None:
    """There are graphs of that width alone. Steps of decode rows have the width that they were told."""
    loop = Loop(make_config(width=4, max_num_batched_tokens=32), acceptance=0.0)
    loop.scheduler.width = 1
    loop.add(make_request("a", [1, 2], 9, ignore_eos=True))
    plans = [loop.tick(), loop.tick()]
    loop.add(make_request("b", [3, 4, 5], 9, ignore_eos=True))
    plans += [loop.tick(), loop.tick()]
    assert [(plan.width, plan.num_decode_rows) for plan in plans if plan] == [(4, 0), (1, 1), (4, 1), (1, 2)]


def test_decode_rows_are_planned_longest_first_and_equals_in_order_of_arrival() -> None:
    loop = Loop(make_config(max_num_batched_tokens=64, max_num_seqs=8), depth=1)
    lengths = {"a": 3, "b": 9, "c": 3, "d": 14}
    loop.add(*(make_request(name, [1] * length, 6, ignore_eos=True) for name, length in lengths.items()))
    assert owners(loop.launch()) == ["a", "b", "c", "d"]  # prompts come in order of arrival
    plan = loop.launch()
    assert owners(plan) == ["d", "b", "a", "c"] and plan is not None
    assert plan.starts_bound.tolist() == [14, 9, 3, 3]
    assert plan.slots.tolist() == [owner.slot for owner in plan.owners]  # type: ignore[attr-defined]
    loop.add(make_request("e", [1] * 12, 6, ignore_eos=True))
    assert owners(loop.launch()) == ["d", "b", "a", "c", "e"]
    plan = loop.launch()
    assert owners(plan) == ["d", "e", "b", "a", "c"] and plan is not None
    assert plan.starts_bound.tolist() == [16, 12, 11, 5, 5]
    loop.finish()
    assert [len(loop.tokens(name)) for name in "abcde"] == [6] * 5


def test_who_is_cut_off_is_the_newest_whatever_its_length() -> None:
    loop = Loop(make_config(max_num_batched_tokens=16, max_num_seqs=8, num_blocks=5, max_model_len=16))
    loop.add(make_request("short", [1] * 4, 5, ignore_eos=True), make_request("long", [2] * 8, 5, ignore_eos=True))
    assert owners(loop.tick()) == ["short", "long"]
    assert owners(loop.tick()) == ["short"]  # one block was left: the later request, though longer, sits out
    loop.finish()
    assert [len(loop.tokens(name)) for name in ("short", "long")] == [5, 5]


@pytest.mark.parametrize("cohorts", [2, 3])
def test_rows_of_several_stages_take_turns(cohorts: int) -> None:
    """A row waits while the last stage may still draw its token; a prompt's first token counts as any other."""
    loop = Loop(make_config(cohorts=cohorts, max_num_seqs=8, max_num_batched_tokens=32), depth=1)
    loop.add(make_request("a", [1, 2], 20, ignore_eos=True))
    assert [owners(loop.launch()) for _ in range(2)] == [["a"], ["a"]]
    loop.add(make_request("b", [1, 2, 3], 20, ignore_eos=True))
    assert owners(loop.launch()) == ["a", "b"]
    assert [owners(loop.launch()) for _ in range(4)] == [["a"], ["b"], ["a"], ["b"]], "both drew in the step before"
    names = [f"r{number}" for number in range(2 * cohorts - 2)]
    loop.add(*(make_request(name, [1] * (4 + number), 20, ignore_eos=True) for number, name in enumerate(names)))
    drew: dict[str, int] = {}
    for step in range(12):
        plan = loop.launch()
        rows = owners(plan)
        assert plan is not None and len(rows[: plan.num_decode_rows]) <= 2
        for row in rows[: plan.num_decode_rows]:
            if row in drew and step > 2 * cohorts:
                assert step - drew[row] == cohorts
        drew |= dict.fromkeys(rows, step)
    assert {*drew} == {"a", "b", *names}


def test_no_more_rows_than_slots_and_first_come_first_served() -> None:
    loop = Loop(make_config(max_num_seqs=2), depth=1)
    for name in "abc":
        loop.add(make_request(name, [1, 2, 4], 4, ignore_eos=True))
    assert owners(loop.launch()) == ["a", "b"]
    assert loop.scheduler.stats().num_running == 2 and loop.scheduler.stats().num_waiting == 1
    loop.finish()
    assert all(len(loop.tokens(name)) == 4 for name in "abc")


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    loop = Loop(make_config(num_blocks=10, max_num_batched_tokens=64))
    loop.add(make_request("a", [1] * 20, 2, ignore_eos=True))
    loop.add(make_request("big", [2] * 24, 2, ignore_eos=True), make_request("tiny", [4], 2, ignore_eos=True))
    assert owners(loop.tick()) == ["a"]  # "tiny" would fit, "big" comes first


def test_uploads_are_spread_over_steps() -> None:
    loop = Loop(make_config(max_upload_ints=31, max_num_batched_tokens=64))
    loop.add(*(make_request(name, [1] * 14, 2, ignore_eos=True) for name in "abc"))
    assert owners(loop.tick()) == ["a", "b"]
    plan = loop.tick()
    assert plan is not None and [a.request.request_id for a in plan.admissions] == ["c"]


def test_what_the_caller_says_an_upload_costs_counts() -> None:
    scheduler = Scheduler(make_config(max_upload_ints=100), upload_ints=lambda message: 60)
    for name in "ab":
        scheduler.add(make_request(name, [1, 2], 2))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_rows == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "uploads", "word"),
    [([], 4, 1000, "no tokens"), ([1] * 30, 3, 1000, "exceeds"), ([1] * 20, 4, 22, "one step")],
)
def test_impossible_requests_are_refused_at_once(prompt: list[int], max_tokens: int, uploads: int, word: str) -> None:
    scheduler = Scheduler(make_config(max_upload_ints=uploads))
    with pytest.raises(InvalidRequestError, match=word):
        scheduler.add(make_request("a", prompt, max_tokens))
    assert not scheduler.has_unfinished()


def test_an_id_can_be_open_only_once() -> None:
    loop = Loop(make_config())
    loop.add(make_request("a", [1, 2], 2))
    with pytest.raises(InvalidRequestError, match="already open"):
        loop.scheduler.add(make_request("a", [1, 2], 2))
    loop.finish()
    loop.add(make_request("a", [1, 2], 2))
    loop.finish()


def test_nothing_is_scheduled_past_max_tokens() -> None:
    loop = Loop(make_config(), depth=9)
    loop.add(make_request("a", [1, 2], 3, ignore_eos=True))
    assert [loop.launch() is not None for _ in range(4)] == [True, True, True, False]
    assert loop.scheduler.has_unfinished() and loop.scheduler.num_in_flight == 3
    # Its last row is launched: slot and blocks are free for the next step before any result has come.
    assert loop.scheduler.stats().kv_cache_usage == 0 and loop.scheduler.stats().num_running == 1
    loop.finish()
    assert loop.reason("a") == "length"


def test_the_newest_request_is_preempted_and_resumes_with_all_its_tokens() -> None:
    loop = Loop(make_config(max_model_len=20, num_blocks=7, enable_prefix_caching=False), depth=3)
    a = make_request("a", [1, 2, 4, 5, 6], 14, ignore_eos=True)
    b = make_request("b", [7, 8, 9, 1, 2], 14, ignore_eos=True)
    loop.add(a, b)
    while not loop.scheduler.stats().num_preemptions:
        loop.tick()
    life = loop.scheduler._life
    assert [r.request_id for r in life.running.requests()] == ["a"]
    assert life.waiting.head.request_id == "b" and life.waiting.head.in_flight > 0
    seen = len(loop.device.log)
    loop.finish()
    resumed = [x for p in loop.device.log[seen:] for x in p.admissions]
    assert [x.request.request_id for x in resumed] == ["b"] and resumed[0].num_computed == 0
    known = resumed[0].token_ids.tolist()
    assert known == ([7, 8, 9, 1, 2] + predict(b)[0])[: len(known)] and len(known) > 5
    assert loop.tokens("a") == predict(a)[0] and loop.tokens("b") == predict(b)[0]


def test_victims_return_to_the_queue_in_their_order() -> None:
    loop = Loop(make_config(max_model_len=24, num_blocks=8, max_num_seqs=3, enable_prefix_caching=False))
    loop.add(*(make_request(name, [i, 2, 4], 20, ignore_eos=True) for i, name in enumerate("abc")))
    loop.add(make_request("d", [9], 2, ignore_eos=True))
    while loop.scheduler.stats().num_preemptions < 2:
        loop.tick()
    queue = loop.scheduler._life.waiting._queue
    assert list(queue) == ["b", "c", "d"]
    # A resumed request sends what it had generated, too.
    assert [r.upload_now for r in queue.values()] == [len(r.tokens) for r in queue.values()]
    assert queue["b"].upload_now > 3
    loop.finish()


def test_the_plan_lists_every_block_of_an_admission_and_only_new_ones_later() -> None:
    loop = Loop(make_config())
    loop.add(make_request("a", list(range(9)), 1))
    loop.finish()
    loop.add(make_request("b", [*range(8), 10, 1], 6, ignore_eos=True))
    plan = loop.tick()
    assert plan is not None and plan.admissions[0].num_computed == 8
    assert plan.block_edit_indices.tolist() == [0, 1, 2] and 0 not in plan.block_edit_ids.tolist()
    assert [len(p.block_edit_ids) for p in (loop.tick(), loop.tick(), loop.tick()) if p] == [0, 0, 1]


def lagging(name: str, prompt: list[int], max_tokens: int) -> AddRequest:
    message = make_request(name, prompt, max_tokens, ignore_eos=True)
    message.host_grammar = "grammar"
    return message


def test_a_row_that_lags_waits_for_its_mask_and_nobody_else_does() -> None:
    loop = Loop(make_config(), depth=2)
    loop.add(lagging("slow", [1, 2], 4), make_request("a", [1, 2], 9, ignore_eos=True))
    assert loop.tick() is None, "it is at the head of the queue"
    loop.pay(1)
    plan = loop.tick()
    assert owners(plan) == ["slow", "a"] and plan is not None and [slot for slot, _ in plan.masks] == [plan.slots[0]]
    for _ in range(4):
        plan = loop.tick()
        assert owners(plan) == ["a"] and plan is not None and not plan.masks
    loop.pay(1)
    plan = loop.tick()
    assert owners(plan) == ["a", "slow"] and plan is not None
    assert plan.num_decode_rows == 2 and plan.starts_bound.tolist() == [6, 2]
    loop.finish()
    assert len(loop.tokens("slow")) == 4 and len(loop.tokens("a")) == 9


def test_masks_are_spread_over_steps_as_the_upload_allows() -> None:
    loop = Loop(make_config(max_upload_ints=200, max_num_batched_tokens=64))
    loop.add(*(lagging(name, [1, 2], 5) for name in "abcd"))
    loop.pay(4)
    loop.tick()
    loop.pay(4)
    assert [len(plan.masks) for plan in (loop.tick(), loop.tick()) if plan] == [3, 1]


def test_masks_of_unknown_requests_are_ignored() -> None:
    loop = Loop(make_config())
    loop.scheduler.provide_mask("nobody", np.zeros(1, np.int32))
    assert loop.tick() is None
