"""Figures of profiled decode steps: from records of the profiler to times, counts and a timeline."""

from __future__ import annotations

from headway.cli.bench.anchors import profiled
from headway.cli.bench.anchors.profiled import Event, Profiled, Timed


def test_figures_of_a_profile() -> None:
    events = []
    for step in range(2):
        at = step * 100.0
        events += [Event("kernel", "gemm", at, 30.0), Event("kernel", "attention", at + 30, 50.0)]
        events += [
            Event("copy", "Memcpy HtoD (Pinned -> Device)", at, 1.0),
            Event("copy", "Memcpy DtoH (Device -> Pinned)", at, 2.0),
        ]
        events += [Event("host", "cudaGraphLaunch", at, 5.0), Event("host", "cudaEventSynchronize", at, 40.0)]
    events.append(Event("host", "cudaStreamSynchronize", 150.0, 3.0))
    found = profiled.figures(Timed(100.0, 60.0), Profiled(2, 1.0, 40.0, events), True)
    assert found == {
        "busy_pct": 80.0, "kernels_per_step": 2.0, "host_us_per_step": 60.0, "host_waits_per_step": 0.5,
        "h2d_per_step": 1.0, "d2h_per_step": 1.0, "kernel_over_floor": 2.0,
    }  # fmt: skip
    assert profiled.figures(Timed(100.0, 60.0), Profiled(2, 0.0, None, []), False) == {"host_us_per_step": 60.0}


def test_records_of_the_profiler_are_sorted() -> None:
    raw = [
        (False, profiled.MARK, 10.0, 90.0), (True, profiled.MARK, 12.0, 99.0), (True, "gemm", 20.0, 25.0),
        (True, "Memcpy HtoD (Pinned -> Device)", 15.0, 16.0), (True, "late", 95.0, 99.0), (False, "aten::mm", 11.0, 12.0),
        (False, "cudaGraphLaunch", 11.0, 13.0), (False, "cudaDeviceSynchronize", 5.0, 6.0),
        (False, "cudaDeviceSynchronize", 91.0, 99.0), (False, "cuLaunchKernel", 30.0, 31.0),
    ]  # fmt: skip
    assert profiled.sort_events(raw) == [
        Event("kernel", "gemm", 20.0, 5.0), Event("copy", "Memcpy HtoD (Pinned -> Device)", 15.0, 1.0),
        Event("kernel", "late", 95.0, 4.0), Event("host", "cudaGraphLaunch", 11.0, 2.0),
        Event("host", "cuLaunchKernel", 30.0, 1.0),
    ]  # fmt: skip


def test_a_timeline_begins_with_an_upload() -> None:
    events = [Event("copy", "Memcpy HtoD", 100.0 * i, 1.0) for i in range(9)]
    events += [Event("kernel", "k", 100.0 * i + 10, 50.0) for i in range(9)]
    found = profiled.make_timeline(events, 8)
    assert found == {"rows": 8, "events": [[lane, name, at, us] for i in range(3) for lane, name, at, us in (
        ("copy", "Memcpy HtoD", 100.0 * i, 1.0), ("kernel", "k", 100.0 * i + 10, 50.0))]}  # fmt: skip
    assert profiled.make_timeline(events[:2], 8) is None
