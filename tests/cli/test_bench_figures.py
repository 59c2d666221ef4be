"""Figures of a benchmark's run, at their limits."""

from __future__ import annotations

import pytest

from headway.cli.bench import metrics
from headway.cli.bench.load import Record


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2el"])
def test_a_request_at_its_limit_is_good(name: str) -> None:
    """Of each metric: at the limit, and a microsecond beyond; one token has no time per token."""
    record = Record(0, ttft=0.5, latency=1.5, output_tokens=5, num_chunks=5)
    limit = {"ttft": 500.0, "tpot": 250.0, "e2el": 1500.0}[name]
    for limit_ms, good in ((limit, 1), (limit + 1e-3, 1), (limit - 1e-3, 0)):
        settings = metrics.Settings(1.0, None, [], [], {name: limit_ms})
        found = metrics.figures([record], [None], 0.0, settings)
        assert found["request_goodput"] * found["duration"] == pytest.approx(good)
    record.output_tokens = 1
    found = metrics.figures([record], [None], 0.0, metrics.Settings(1.0, None, [], [], {"tpot": 1e-6}))
    assert found["request_goodput"] > 0
