"""torch.profiler's records: read from its memory, given their lines, bounded; and what the page says of the rest."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from headway import syncs
from headway.syncs import recording
from headway.syncs.allowlist import AllowList, Entry
from headway.syncs.findings import Log
from headway.syncs.live import ANNOTATION, LiveProbe
from headway.syncs.profiler_probe import ProfilerRun
from headway.syncs.report import Run, summary, to_dict
from headway.syncs.session import _merge, watch
from headway.syncs.trace import END, PROOF, Trace, may_wait, read
from tests.syncs.fake import FakeRuntime, device_tensor
from tests.syncs.fake_kineto import FakeEvent, FakeResults, call, note, work

LINE = ANNOTATION + json.dumps(["/u/a.py", 12, "step", "Tensor.item"])
LATER = ANNOTATION + json.dumps(["/u/a.py", 40, "outer", "torch.add"])


def trace_of(*events: FakeEvent, max_work: int = 100) -> Trace:
    found = recording.read(FakeResults(list(events)), ANNOTATION, may_wait, max_work)
    return read(found, {9: "MainThread"})


PROOFS = (note(PROOF, 0, 10), call("cudaDeviceSynchronize", 1, 8))


def test_records_are_read() -> None:
    trace = trace_of(
        *PROOFS,
        call("cudaStreamSynchronize", 9.5, 0.1),  # the other probes' set-up
        work("Memset", 9.6, 0.1),
        note(LINE, 20, 30),
        call("cudaStreamSynchronize", 25, 20),
        call("cudaLaunchKernel", 46, 2),
        FakeEvent(LINE, 20, 30, 7, on_device=True, annotation=True),  # its shadow on the device
        note(LATER, 60, 4),
        call("cuStreamSynchronize", 65, 5),
        call("cudaMemcpyAsync", 75, 2, correlation=5),
        call("cudaMemcpyAsync", 78, 2, correlation=6),
        work("Memcpy HtoD (Pageable -> Device)", 76, 3, correlation=5),
        work("Memcpy HtoD (Pinned -> Device)", 80, 3, correlation=6),
        call("cudaEventSynchronize", 90, 5, lane=4),
        note(END, 110, 10),
        call("cudaDeviceSynchronize", 111, 8),
    )
    assert trace.proven and trace.begin == 10
    (inside,) = trace.waits
    assert (str(inside.kind), inside.call, inside.micros, inside.site.line) == (
        "stream",
        "cudaStreamSynchronize",
        20.0,
        12,
    )
    assert inside.start_ns == 25_000 and inside.thread == "MainThread"
    outside = [(str(wait.kind), wait.call, str(wait.site), wait.thread) for wait in trace.outside]
    assert outside == [
        ("stream", "cuStreamSynchronize after torch.add", "/u/a.py:40", "MainThread"),
        ("pageable", "cudaMemcpyAsync after torch.add", "/u/a.py:40", "MainThread"),
        ("event", "cudaEventSynchronize", "<native thread>", "thread 4"),
    ]
    assert trace.streams == {
        "GPU 0, stream 7": [
            (76.0, 3.0, "Memcpy HtoD (Pageable -> Device)"),
            (80.0, 3.0, "Memcpy HtoD (Pinned -> Device)"),
        ]
    }


def test_records_without_the_proof_are_unproven() -> None:
    run = ProfilerRun()
    run.trace = trace_of(call("cudaDeviceSynchronize", 1, 8), FakeEvent("aten::add", 0, 1))
    with pytest.raises(syncs.ProbeError, match="not even a deliberate wait"):
        run.require_proof()
    run.trace = trace_of(*PROOFS)
    assert not run.require_proof().waits


def test_the_innermost_line_counts() -> None:
    trace = trace_of(*PROOFS, note(LATER, 20, 50), note(LINE, 25, 10), call("cudaStreamSynchronize", 26, 2))
    assert [wait.site.line for wait in trace.waits] == [12]


def test_too_much_work_is_counted_and_waits_are_found_all_the_same() -> None:
    trace = trace_of(
        *PROOFS,
        note(LINE, 20, 90),
        *(work("gemm", 20 + i, 1) for i in range(100)),
        work("Memcpy HtoD (Pageable -> Device)", 150, 3, correlation=5),
        call("cudaMemcpyAsync", 50, 2, correlation=5),
    )
    assert trace.unread == 1 and len(trace.streams["GPU 0, stream 7"]) == 100
    assert [str(wait.kind) for wait in trace.waits] == ["pageable"]


def merged(*entries: Entry, events: tuple[FakeEvent, ...], max_work: int = 10**6) -> Run:
    run = Run(["x.py"], "profiler", Log(), 1000.0, start_micros=5010.0)
    profiler = ProfilerRun()
    profiler.trace = trace_of(*PROOFS, *events, max_work=max_work)
    _merge(run, profiler, AllowList(list(entries)))
    return run


def test_lines_are_allowed_and_what_is_near_them_is_not() -> None:
    everything = Entry("*", "", "measured", None, "*")
    events = (note(LINE, 20, 10), call("cudaStreamSynchronize", 25, 2), call("cudaFree", 35, 2))
    run = merged(everything, events=events)
    assert [(f.call, f.reason) for f in run.log.sanctioned] == [("cudaStreamSynchronize", "measured")]
    assert [f.call for f in run.log.unsanctioned] == ["cudaFree after Tensor.item"]


def test_what_the_live_probe_saw_is_not_counted_again() -> None:
    run = Run(["x.py"], "profiler", Log(), 1000.0)
    run.log.add(syncs.Wait(syncs.Site("/u/a.py", 12, "step"), syncs.Kind.READ, "Tensor.item"))
    profiler = ProfilerRun()
    profiler.trace = trace_of(
        *PROOFS, note(LINE, 20, 10), call("cudaStreamSynchronize", 25, 2), call("cudaFree", 35, 2)
    )
    _merge(run, profiler, AllowList())
    assert sorted(f.call for f in run.log.findings) == ["Tensor.item", "cudaFree after Tensor.item"]


def test_the_wrapped_waits_are_annotated_too() -> None:
    """Else their driver calls would count as another wait, beside them."""
    runtime = FakeRuntime()
    live = LiveProbe(runtime, annotate=True)
    x = device_tensor(runtime, 1.0)
    with recording.profile([torch.profiler.ProfilerActivity.CPU]) as profile, syncs.record(probes=(live,)) as log:
        runtime.event_class().synchronize()
        x.item()
    found = recording.read(profile.profiler.kineto_results, ANNOTATION, may_wait)
    lines = [json.loads(event.name.removeprefix(ANNOTATION)) for event in found.annotations]
    assert [(line, called) for _, line, _, called in lines] == sorted((f.site.line, f.call) for f in log.findings)
    assert [called for *_, called in lines] == ["Event.synchronize", "Tensor.item"]


def test_annotations_come_from_every_thread_with_their_quotes() -> None:
    """The real profiler, its CPU side: names are kept as they are, lanes are the system's thread ids."""
    lanes = {}

    def annotate() -> None:
        lanes[threading.get_native_id()] = threading.current_thread().name
        with torch.profiler.record_function(LINE):
            torch.ones(3).sum()

    with recording.profile([torch.profiler.ProfilerActivity.CPU]) as profile:
        other = threading.Thread(target=annotate, name="other")
        other.start()
        other.join()
        annotate()
    found = recording.read(profile.profiler.kineto_results, ANNOTATION, may_wait)
    assert [lanes[event.lane] for event in found.annotations] == ["other", "MainThread"]
    assert {event.name for event in found.annotations} == {LINE}
    assert all(0 <= event.start < 60e6 for event in found.annotations), "microseconds since the recording began"


def test_three_hundred_thousand_kernels_make_a_page_that_says_what_it_leaves_out() -> None:
    kernels = [f"void kernel_{i}<float, {'x' * 50}>" for i in range(40)]
    many = (work(kernels[i % 40], 20.0 + 10 * i, 4.0, stream=7 + i % 2) for i in range(300_000))
    waits = (
        event
        for i in range(30_000)
        for event in (note(LINE, 20.0 + 100 * i, 50), call("cudaStreamSynchronize", 30.0 + 100 * i, 5))
    )
    run = merged(events=(*many, *waits))
    run.wall_micros = 3e6
    data = to_dict(run)
    assert data["gpu"] == {"busy_micros": 1_200_000.0, "busy_percent": 40.0}
    assert data["totals"]["unsanctioned"] == 30_000 and data["totals"]["micros_lost"] == 150_000.0
    timeline = data["timeline"]
    assert [len(row["spans"]) for row in timeline["streams"]] == [18_750] * 2
    assert timeline["streams"][1]["spans"][0] == [20.0, 4.0, timeline["names"].index(kernels[1])]
    hidden = {"MainThread": 15_000, "GPU 0, stream 7": 131_250, "GPU 0, stream 8": 131_250, "gaps": 279_999}
    assert timeline["hidden"] == hidden
    assert "timeline: GPU 0, stream 8: 131,250 more not shown; sums are exact" in data["notes"]


def test_the_page_says_that_work_was_left_unread() -> None:
    run = merged(events=tuple(work("gemm", 20 + i, 1) for i in range(9)), max_work=5)
    data = to_dict(run)
    assert data["gpu"] is None, "a share of which a part is missing is none"
    assert any(note.startswith("timeline: 4 more pieces of GPU work not shown") for note in data["notes"])


def test_waits_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.syncs.findings.MAX_WAITS", 3)
    run = merged(events=tuple(call("cudaFree", 20 + 2 * i, 1) for i in range(5)))
    data = to_dict(run)
    assert data["totals"]["unsanctioned"] == 5 and len(data["timeline"]["threads"][0]["spans"]) == 3
    assert "timeline: 2 more waits not shown; sums are exact" in data["notes"]
    assert "note: timeline: 2 more waits not shown; sums are exact" in summary(run)


def test_a_program_under_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, on the real profiler's CPU side: what CUDA would be called is a name among its records."""
    runtime = FakeRuntime()

    def wait(name: str) -> None:
        with torch.profiler.record_function(name):
            torch.ones(1)

    monkeypatch.setattr("headway.syncs.runtime.CudaRuntime", lambda: runtime)
    monkeypatch.setattr(recording, "activities", lambda: [torch.profiler.ProfilerActivity.CPU])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: wait("cudaDeviceSynchronize"))
    warn = FakeRuntime.sync

    def sync(self: FakeRuntime) -> None:
        wait("cudaStreamSynchronize")
        warn(self)

    monkeypatch.setattr(FakeRuntime, "sync", sync)

    x = device_tensor(runtime, 1.0)

    def work() -> int:
        def reads() -> None:
            x.item()
            wait("cudaFree")  # an extension's

        other = threading.Thread(target=reads, name="other")
        other.start()
        other.join()
        return 7

    run = watch(work, ["x.py"], AllowList(), driver="profiler")
    assert (run.exit_status, run.mode) == (7, "profiler")
    found = [(f.call, f.count, f.site.function, *f.threads) for f in run.log.findings]
    here = "test_a_program_under_the_profiler.<locals>.work.<locals>.reads"
    assert sorted(found) == [("Tensor.item", 1, here, "other"), ("cudaFree after Tensor.item", 1, here, "other")]
    at = {wait.call: wait.start_ns / 1000 - run.start_micros for wait in run.log.waits}
    assert 0 < at["Tensor.item"] < at["cudaFree after Tensor.item"] < run.wall_micros, "one clock"
