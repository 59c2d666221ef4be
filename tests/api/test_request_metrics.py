"""Times and sizes of requests, measured where updates arrive; the clock is the test's."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headway.api import output_processor
from headway.api.inputs import Door
from headway.api.output_processor import OpenRequest, OutputProcessor
from headway.api.request_metrics import RequestMetrics, token_bounds
from headway.core.messages import RequestUpdate
from headway.core.params import SamplingParams
from tests.api.fakes import ByteTokenizer
from tests.engine.fake_core import model_info


class Clock:
    """Stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(output_processor, "monotonic", clock)
    return clock


def start(**params: Any) -> tuple[RequestMetrics, OutputProcessor, OpenRequest]:
    tokenizer = cast(Any, ByteTokenizer())
    metrics = RequestMetrics(4096)
    processor = OutputProcessor(tokenizer, metrics)
    prepared = Door(model_info(), tokenizer).prepare("four", SamplingParams(**params))
    request = processor.open(prepared, "name")
    assert request.arrived == 100.0
    request.arrived = 99.0
    return metrics, processor, request


def update(text: str, child: str = "0-0", **fields: Any) -> RequestUpdate:
    return RequestUpdate(request_id=child, new_token_ids=list(text.encode()), **fields)


def test_one_request_from_arrival_to_end(clock: Clock) -> None:
    metrics, processor, _ = start(max_tokens=30)
    clock.now = 101.0
    processor.apply([update("a", queue_seconds=0.5)])
    clock.now = 101.25
    processor.apply([update("b"), update("c"), update("d")])
    clock.now = 102.0
    processor.apply([update("e", finish_reason="length")])
    assert (metrics.first_token.count, metrics.first_token.total) == (1, 2.0)
    assert (metrics.next_token.count, metrics.next_token.total) == (2, 1.0), "one interval a delivery"
    assert (metrics.whole.total, metrics.queue.total) == (3.0, 0.5)
    assert (metrics.prefill.total, metrics.decode.total, metrics.inference.total) == (1.5, 1.0, 2.5)
    assert (metrics.prompt_tokens.total, metrics.generation_tokens.total, metrics.max_tokens.total) == (5, 5, 30)
    assert (metrics.per_token.count, metrics.per_token.total) == (1, 0.25)
    assert metrics.n.total == 1 and metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_each_completion_counts_and_ends_once(clock: Clock) -> None:
    metrics, processor, request = start(n=3, max_tokens=9)
    processor.apply([update("a", "0-0"), update("b", "0-1"), update("c", "0-2")])
    processor.apply([update("a", "0-0", finish_reason="stop"), update("b", "0-1", finish_reason="error", error="no")])
    processor.drop(request)
    processor.drop(request)
    processor.apply([update("late", "0-2", finish_reason="stop")])
    assert metrics.finished == {"stop": 1, "length": 0, "abort": 1, "error": 1}
    assert metrics.whole.count == 3 and metrics.first_token.count == 3
    assert (metrics.n.count, metrics.n.total) == (1, 3)


def test_a_request_that_never_began_has_no_queue_time(clock: Clock) -> None:
    metrics, processor, request = start()
    processor.drop(request)
    assert metrics.finished["abort"] == 1 and metrics.whole.count == 1
    assert metrics.queue.count == metrics.prefill.count == metrics.first_token.count == 0


def test_a_stop_string_counts_as_stop(clock: Clock) -> None:
    metrics, processor, _ = start(stop="c")
    processor.apply([update("abcd", queue_seconds=0.0)])
    assert metrics.finished["stop"] == 1 and metrics.generation_tokens.total == 3


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, (1,)), (60, (1, 2, 5, 10, 20, 50)), (100, (1, 2, 5, 10, 20, 50, 100))]
)
def test_token_bounds(most: int, bounds: tuple[int, ...]) -> None:
    assert token_bounds(most) == bounds
