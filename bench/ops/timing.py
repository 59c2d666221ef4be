"""Times operations the way the engine runs them: many in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.core.ints import cdiv


def time_calls(
    calls: Sequence[Callable[[], Any]], least: int = 20, replays: int = 5, before: Callable[[], Any] | None = None
) -> float:
    """Microseconds per call: at least ``least`` calls in one graph, best of ``replays``; ``before`` each of which is called,
    whose kernels are not counted."""
    sequence = list(calls) * cdiv(least, len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in sequence:
            call()
    graph.replay()
    best = float("inf")
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if before is not None:
            before()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / len(sequence))
    return best


def read_bytes_per_us() -> float:
    """Bytes that a plain reduction of 2 GiB reads in a microsecond on this card."""
    x = torch.zeros(2**29, device="cuda")
    return 2.0**31 / time_calls([x.sum], least=4)
