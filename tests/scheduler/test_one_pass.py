"""Texts that live for one step: what a step takes, and whose the vectors are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.core.errors import HeadwayError, InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.plan import StepPlan, StepResult
from headway.core.task import Task
from headway.scheduler import OnePassScheduler
from tests.scheduler.fake_device import make_request
from tests.scheduler.loop import make_config


def text(name: str, length: int, task: Task = Task.EMBED, **fields: Any) -> AddRequest:
    request = make_request(name, [ord(name[0])] * length, 1)
    request.task = task
    for field, value in fields.items():
        setattr(request, field, value)
    return request


def scheduler(**changes: Any) -> OnePassScheduler:
    sizes = {"num_blocks": 0, "max_model_len": 16, "max_num_batched_tokens": 16, **changes}
    return OnePassScheduler(make_config(pools=True, **sizes), lambda message: len(message.prompt_token_ids))


def planned(made: OnePassScheduler) -> StepPlan:
    plan = made.schedule()
    assert plan is not None and plan.pools and plan.num_decode_rows == 0 and plan.texts is not None
    assert plan.slots.tolist() == list(range(plan.num_rows)) and plan.samples.all() and not plan.starts_bound.any()
    return plan


def result(plan: StepPlan, **left_out: bool) -> StepResult:
    """Each vector is the first letter of its row's text, of its token with the token's place behind it."""
    assert plan.texts is not None
    rows, tokens = plan.num_rows, plan.texts.tokens
    found = StepResult(np.zeros(rows, np.int32), np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32))
    starts = plan.query_lens.cumsum() - plan.query_lens
    if not left_out.get("vectors"):
        found.vectors = tokens[starts, None].astype(np.float32)
    if plan.token_vectors and not left_out.get("token_vectors"):
        place = np.arange(len(tokens)) - np.repeat(starts, plan.query_lens)
        found.token_vectors = np.stack([tokens, place], 1).astype(np.float32)
    return found


def told(updates: Any) -> dict[str, list[float]]:
    updates = list(updates)
    assert all(each.finish_reason == "stop" and each.error is None for each in updates), updates
    return {each.request_id: np.frombuffer(each.pooled, np.float32).tolist() for each in updates}


def vector(name: str) -> list[float]:
    return [float(ord(name))]


def test_texts_are_whole_the_longest_first_and_begin_at_once() -> None:
    made = scheduler(max_num_seqs=3)
    for name, length in (("a", 9), ("b", 3), ("c", 4), ("d", 13), ("e", 1)):
        made.add(text(name, length))
    assert made.stats().num_waiting == 5
    first, second, third = planned(made), planned(made), made.schedule()
    assert first.query_lens.tolist() == [9, 4, 3] and second.query_lens.tolist() == [13, 1] and third is None
    assert (made.stats().num_running, made.stats().num_waiting) == (5, 0)
    assert told(made.apply(first, result(first))) == {"a": vector("a"), "c": vector("c"), "b": vector("b")}
    assert told(made.apply(second, result(second))) == {"d": vector("d"), "e": vector("e")}
    assert not made.has_unfinished() and made.stats().prompt_tokens == 30 and made.stats().num_steps == 2
    made.check_integrity()


def test_a_step_has_no_more_tokens_than_it_holds() -> None:
    made = scheduler()
    for name, length in (("a", 9), ("b", 8), ("c", 7), ("d", 2)):
        made.add(text(name, length))
    assert [planned(made).query_lens.tolist() for _ in range(3)] == [[9], [8, 7], [2]], "b does not fit beside a"


def test_a_step_carries_no_more_than_its_upload() -> None:
    made = scheduler(max_upload_ints=12)
    for name, length in (("a", 6), ("b", 7), ("c", 5)):
        made.add(text(name, length))
    assert [planned(made).query_lens.tolist() for _ in range(2)] == [[6], [7, 5]]
    with pytest.raises(InvalidRequestError, match="13 values in one step"):
        made.add(text("d", 13))


def test_vectors_of_texts_that_are_gone_are_nobodys() -> None:
    """Aborted while they wait, in flight, and in flight with the name taken again."""
    made = scheduler(max_num_seqs=4)
    for name in "abcd":
        made.add(text(name, 3))
    assert made.abort("b") and not made.abort("b")
    first = planned(made)
    made.abort("a")
    made.abort("d")
    made.add(text("d", 2))
    made.add(text("b", 5))
    second = planned(made)
    assert second.query_lens.tolist() == [5, 2]
    assert told(made.apply(first, result(first))) == {"c": vector("c")}
    assert told(made.apply(second, result(second))) == {"b": vector("b"), "d": vector("d")}
    assert made.stats().prompt_tokens == 10
    made.check_integrity()


def test_a_name_taken_again_while_its_text_waits() -> None:
    made = scheduler()
    made.add(text("a", 3))
    made.abort("a")
    made.add(text("a", 2))
    plan = planned(made)
    assert plan.query_lens.tolist() == [2] and told(made.apply(plan, result(plan))) == {"a": vector("a")}
    with pytest.raises(HeadwayError, match="oldest in flight"):
        made.apply(plan, result(plan))


def test_tasks_of_texts_and_of_tokens_in_one_step() -> None:
    made = scheduler()
    made.add(text("a", 2))
    made.add(text("b", 4, Task.TOKEN_EMBED, pool_start=1, raw=True))
    made.add(text("c", 3, Task.TOKEN_EMBED, token_type_range=(1, 3)))
    plan = planned(made)
    assert plan.token_vectors and plan.texts is not None
    assert (plan.texts.pool_starts.tolist(), plan.texts.raw.tolist()) == ([1, 0, 0], [1, 0, 0])
    assert plan.texts.type_ranges.tolist() == [[0, 0], [1, 3], [0, 0]]
    found = told(made.apply(plan, result(plan)))
    assert found["a"] == vector("a")
    assert found["b"] == [98.0, 1.0, 98.0, 2.0, 98.0, 3.0] and found["c"] == [99.0, 0.0, 99.0, 1.0, 99.0, 2.0]


@pytest.mark.parametrize("task", [Task.EMBED, Task.TOKEN_EMBED])
def test_a_step_without_vectors_fails_its_texts(task: Task) -> None:
    made = scheduler()
    made.add(text("a", 3, task))
    plan = planned(made)
    (update,) = made.apply(plan, result(plan, vectors=True, token_vectors=True))
    assert update.finish_reason == "error" and "no vectors" in (update.error or "")
    made.check_integrity()


def test_a_step_that_cannot_run_fails_its_texts_and_no_others() -> None:
    made = scheduler(max_num_seqs=2)
    for name in "abc":
        made.add(text(name, 3))
    first, second = planned(made), planned(made)
    with pytest.raises(HeadwayError, match="newest in flight"):
        made.discard(first, "broken")
    assert [(each.request_id, each.error) for each in made.discard(second, "broken")] == [("c", "broken")]
    assert told(made.apply(first, result(first))).keys() == {"a", "b"}
    assert made.fail("a", "late") is None


def test_a_step_that_cannot_run_fails_nobody_who_took_a_name_since() -> None:
    made = scheduler(max_num_seqs=2)
    for name in "ab":
        made.add(text(name, 3))
    broken = planned(made)
    made.abort("a")
    made.add(text("a", 2))
    assert [each.request_id for each in made.discard(broken, "broken")] == ["b"]
    plan = planned(made)
    assert plan.query_lens.tolist() == [2] and told(made.apply(plan, result(plan))) == {"a": vector("a")}
    made.check_integrity()


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (make_request("a", [1], 1), "requests that pool, such as embeddings, not the task 'generate'"),
        (text("a", 17), "17 tokens; 1 to 16"),
        (text("a", 0), "0 tokens; 1 to 16"),
        (text("open", 1), "'open' is already open"),
        (text("a", 1, media=[object()]), "reads texts only"),
    ],
)
def test_what_cannot_run_is_refused_alone(request_: AddRequest, says: str) -> None:
    made = scheduler()
    made.add(text("open", 2))
    with pytest.raises(InvalidRequestError, match=says):
        made.add(request_)
    huge = text("huge", 2)
    huge.prompt_token_ids = [2**40]
    with pytest.raises(OverflowError):
        made.add(huge)
    assert planned(made).num_rows == 1
