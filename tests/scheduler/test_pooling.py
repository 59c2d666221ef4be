"""Requests that generate nothing: whole texts, chunks, no blocks, and results of requests that are gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.core.errors import ConfigError, InvalidRequestError
from headway.core.messages import AddRequest
from headway.core.plan import StepPlan, StepResult
from headway.core.task import Task
from headway.scheduler import Scheduler
from tests.scheduler.fake_device import make_request
from tests.scheduler.loop import make_config


def text(name: str, length: int) -> AddRequest:
    request = make_request(name, [1] * length, 1)
    request.task = Task.EMBED
    return request


def scheduler(**changes: Any) -> Scheduler:
    return Scheduler(make_config(pools=True, **changes))


def result(plan: StepPlan, vectors: bool = True) -> StepResult:
    """Each row's vector is its slot."""
    rows = plan.num_rows
    found = StepResult(np.zeros(rows, np.int32), np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32))
    found.vectors = plan.slots.astype(np.float32)[:, None] if vectors else None
    return found


def planned(made: Scheduler) -> StepPlan:
    plan = made.schedule()
    assert plan is not None and plan.pools and plan.num_decode_rows == 0
    return plan


def test_texts_end_with_their_last_chunk_and_make_room_at_once() -> None:
    made = scheduler(max_num_seqs=2, enable_prefix_caching=False)
    for name, length in (("a", 5), ("b", 20), ("c", 3)):
        made.add(text(name, length))
    first, second = planned(made), planned(made)
    assert [owner.request_id for owner in first.owners] == ["a", "b"]  # type: ignore[attr-defined]
    assert (first.query_lens.tolist(), first.samples.tolist()) == ([5, 11], [True, False])
    assert (second.query_lens.tolist(), second.samples.tolist()) == ([9, 3], [True, True])
    assert made.schedule() is None and made.stats().kv_cache_usage == 0.0
    assert [(u.request_id, u.finish_reason) for u in made.apply(first, result(first))] == [("a", "stop")]
    found = list(made.apply(second, result(second)))
    assert [u.request_id for u in found] == ["b", "c"] and not any(u.new_token_ids for u in found)
    assert [np.frombuffer(u.pooled or b"", np.float32).tolist() for u in found] == [[s] for s in second.slots.tolist()]
    assert not made.has_unfinished() and made.stats().prompt_tokens == 28
    made.check_integrity()


def test_the_vector_of_a_request_that_is_gone_is_nobodys() -> None:
    made = scheduler(max_num_seqs=1, enable_prefix_caching=False)
    made.add(text("a", 3))
    made.add(text("b", 4))
    first, second = planned(made), planned(made)
    assert first.slots.tolist() == second.slots.tolist()
    assert made.abort("a")
    assert list(made.apply(first, result(first))) == []
    assert [u.request_id for u in made.apply(second, result(second))] == ["b"]
    made.check_integrity()


def test_a_step_without_vectors_fails_its_texts() -> None:
    made = scheduler()
    made.add(text("a", 3))
    plan = planned(made)
    (update,) = made.apply(plan, result(plan, vectors=False))
    assert update.finish_reason == "error" and "no vectors" in (update.error or "")
    made.check_integrity()


@pytest.mark.parametrize("changes", [{"pools": False}, {"pools": True, "max_num_batched_tokens": 15}])
def test_what_needs_a_cache_is_refused_without_one(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="without a cache"):
        make_config(num_blocks=0, max_model_len=16, **changes)


def test_requests_of_the_other_kind_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="requests that pool, such as embeddings, not the task 'generate'"):
        scheduler().add(make_request("a", [1], 1))
    with pytest.raises(InvalidRequestError, match="generation, not the task 'embed'"):
        Scheduler(make_config()).add(text("a", 1))
