"""The live probe and the regions, on a runtime without CUDA."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import syncs
from headway.syncs import frames
from headway.syncs.calls import MADE_BY
from headway.syncs.copies import suspicion
from headway.syncs.live import MESSAGE, SPINS, LiveProbe, unheard_calls
from headway.syncs.trees import decide, parse
from tests.syncs.fake import Event, FakeRuntime, device_tensor, in_thread, probe


def test_record_gives_line_call_kind_count_and_time() -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    with syncs.record(probes=(live,)) as log:
        for _ in range(3):
            x.item()
    (finding,) = log.findings
    assert Path(finding.site.file) == Path(__file__)
    assert finding.site.function == "test_record_gives_line_call_kind_count_and_time"
    assert "x.item()" in Path(__file__).read_text().splitlines()[finding.site.line - 1]
    assert (finding.kind, finding.call, finding.count, finding.timed) == (syncs.Kind.READ, "Tensor.item", 3, 3)
    assert finding.micros > 0
    assert not finding.sanctioned and log.count == 3
    assert any("torch" in name for name in log.probes)


def test_forbid_raises_at_the_first_wait_and_names_the_cure() -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    with pytest.raises(syncs.SyncError, match="readback ring") as caught, syncs.forbid(probes=(live,)):
        x.item()
    assert caught.value.wait.call == "Tensor.item"
    x.item()  # outside nothing is forbidden
    assert runtime.mode[-1] is False


def test_allowed_gives_a_reason_and_forbid_inside_is_strict_again() -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    with syncs.record(probes=(live,)) as outer, syncs.allowed("warm-up"):
        with syncs.allowed("inner"):
            x.item()
        x.tolist()
        with pytest.raises(syncs.SyncError), syncs.forbid(probes=(live,)):
            x.item()
    assert {finding.reason for finding in outer.sanctioned} == {"warm-up", "inner"}
    assert outer.count == 0


def test_an_allowance_wants_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        syncs.allowed(" ")


def test_waits_inside_an_own_operation_have_its_lines() -> None:
    """Not the line of whoever calls it, and each line once."""
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)

    def read_twice(given: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            warnings.warn(MESSAGE, UserWarning, stacklevel=1)  # a wait
        return given.clone()

    library = torch.library.Library("headway_live", "DEF")
    library.define("read_twice(Tensor x) -> Tensor")
    library.impl("read_twice", read_twice, "CPU")
    with syncs.record(probes=(live,)) as log:
        torch.ops.headway_live.read_twice(torch.ones(2))
        x.item()  # a read
    lines = Path(__file__).read_text().splitlines()
    found = {lines[finding.site.line - 1].partition("#")[2].strip(): finding.count for finding in log.findings}
    assert found == {"a wait": 1, "a read": 1}


def framed(inner: Callable[[], bool], file: str, name: str = "run") -> Callable[[], bool]:
    """Calls ``inner`` in a frame of that file and qualified name."""

    def run() -> bool:
        return inner()

    run.__code__ = run.__code__.replace(co_filename=file, co_name=name.rpartition(".")[2], co_qualname=name)
    return run


def test_where_code_of_the_users_begins_and_ends_in_a_call() -> None:
    """What a watched call runs of it counts; a call that it makes is watched by itself, as a read, say."""
    probe_file, dispatcher = str(frames.__file__), str(Path(torch.__file__).with_name("_ops.py"))
    files = {"call": probe_file, "torch": dispatcher, "installed": "/x/site-packages/y.py"}

    def found(*places: str) -> bool:
        """What a probe finds below calls within each other, the outermost first."""
        answer = framed(partial(frames.in_own_code, MADE_BY), probe_file)
        for place in reversed(places):
            name = {"call": MADE_BY, "subclass": "__torch_function__"}.get(place, "run")
            answer = framed(answer, files.get(place, __file__), name)
        return answer()

    assert LiveProbe.observed.__qualname__ == MADE_BY
    assert found("own", "call", "torch", "own"), "an operation"
    assert found("own", "call", "own"), "a hook"
    assert not found("own", "call")
    assert not found("own", "call", "torch"), "torch's own Python"
    assert not found("own", "call", "torch", "installed"), "a library's line means its caller"
    assert not found("own", "call", "subclass", "own"), "how a tensor of the user's does it"
    assert not found("own", "torch", "own", "call"), "a call within the operation"


def test_waits_inside_a_hook_have_its_lines() -> None:
    _, live = probe()

    def pack(given: torch.Tensor) -> torch.Tensor:
        warnings.warn(MESSAGE, UserWarning, stacklevel=1)  # in a hook
        return given

    x = torch.ones(2, requires_grad=True)
    with (
        syncs.record(probes=(live,)) as log,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda given: given),
    ):
        x.exp()
    (finding,) = log.findings
    assert Path(__file__).read_text().splitlines()[finding.site.line - 1].endswith("# in a hook")


def test_decorators() -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    log = syncs.Log()

    @syncs.allowed("asked for")
    def read() -> float:
        return x.item()

    @syncs.record(log, probes=(live,))
    def step() -> float:
        return read() + read()

    @syncs.forbid(probes=(live,))
    def strict() -> None:
        x.item()

    assert step() + step() == 4.0
    assert [f.count for f in log.sanctioned] == [4]
    with pytest.raises(syncs.SyncError):
        strict()

    async def later() -> None: ...

    with pytest.raises(TypeError, match="coroutine"):
        syncs.forbid()(later)


def test_a_guard_neither_trips_nor_disarms_another_thread() -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    with syncs.forbid(probes=(live,)) as log:
        assert in_thread(lambda: x.item()) is None  # innocent, though torch's mode is on for it too

        def guarded() -> None:
            with syncs.forbid(probes=(live,)):
                x.item()

        assert isinstance(in_thread(guarded), syncs.SyncError)
        with pytest.raises(syncs.SyncError):  # still armed after the other thread left its guard
            x.item()
    assert log.count == 1


def test_an_allowance_elsewhere_disarms_nobody() -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with syncs.allowed("on another thread"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    try:
        with pytest.raises(syncs.SyncError), syncs.forbid(probes=(live,)):
            x.item()
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize("method", ["event", "spin"])
def test_events_and_query_loops(method: str) -> None:
    runtime, live = probe()
    with syncs.record(probes=(live,)) as log:
        event = runtime.event_class()
        if method == "event":
            event.synchronize()
        else:
            event.left = SPINS + 2
            while not event.query():
                pass
    assert [(f.kind, f.count) for f in log.findings] == [("event" if method == "event" else "query", 1)]
    assert runtime.event_class.__dict__["synchronize"] is Event.synchronize  # the wrapper is gone


def test_a_single_query_is_no_wait() -> None:
    runtime, live = probe()
    with syncs.record(probes=(live,)) as log:
        for _ in range(3):
            runtime.event_class().query()
    assert not log.findings


def test_a_query_between_pieces_of_work_is_no_loop() -> None:
    runtime, live = probe()
    event = runtime.event_class()
    event.left = 5 * SPINS
    with syncs.record(probes=(live,)) as log:
        while not event.query():
            torch.ones(2) + 1
    assert not log.findings


class Answers:
    """float64 is the device's, all else is pinned."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.float64

    def pinned(self, tensor: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize(
    ("host", "waits"),
    [
        (torch.zeros(4), False),
        (torch.zeros(8)[::2], True),
        (torch.zeros(3, 4).t(), True),  # cast on the device, but made contiguous on the host
        (torch.zeros(3, 4, dtype=torch.float64).t(), False),
        (torch.zeros(3, 4)[1:3], False),
        (torch.zeros(3, 4)[:, :2], True),
        (torch.zeros(1, 4).expand(3, 4), True),
    ],
    ids=["dense", "every other", "transposed and cast", "transposed", "window", "columns", "broadcast"],
)
def test_pinned_memory_with_holes_is_copied_by_way_of_pageable_memory(host: torch.Tensor, waits: bool) -> None:
    made = torch.zeros_like(host, dtype=torch.float64)
    kind = suspicion("Tensor.to", (host,), {"non_blocking": True}, made, Answers())
    assert kind == (syncs.Kind.PAGEABLE if waits else None)


def test_copies_that_only_claim_not_to_block() -> None:
    _, live = probe()
    device = torch.zeros(4, dtype=torch.float64)
    with syncs.record(probes=(live,)) as log:
        device.copy_(torch.zeros(4, dtype=torch.float32), non_blocking=True)
        device.copy_(torch.zeros(4), non_blocking=False)
        device.copy_(torch.ones(4, dtype=torch.float64), non_blocking=True)  # device to device
        torch.zeros(3).copy_(torch.ones(3))
        torch.tensor([1.0], dtype=torch.float64)
    assert sorted(str(f.kind) for f in log.findings) == ["pageable", "upload", "upload"]


def test_fails_loudly_without_a_device_or_when_deaf() -> None:
    _, absent = probe(present=False)
    with pytest.raises(syncs.ProbeError, match="no device"), syncs.record(probes=(absent,)):
        pass
    runtime, deaf = probe(deaf=True)
    with pytest.raises(syncs.ProbeError, match="unnoticed"), syncs.forbid(probes=(deaf,)):
        pass
    assert runtime.mode[-1] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_the_default_probe_refuses_a_machine_without_cuda() -> None:
    with pytest.raises(syncs.ProbeError, match="nothing to watch"), syncs.record():
        pass


def test_hooks_survive_catch_warnings_and_leave_no_trace() -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    shown, filters = warnings.showwarning, list(warnings.filters)
    with syncs.record(probes=(live,)) as log:
        with warnings.catch_warnings(record=True) as others:
            warnings.simplefilter("error")
            warnings.simplefilter("always", DeprecationWarning)
            x.item()
            warnings.warn("another matter", DeprecationWarning, stacklevel=1)
        x.item()
    assert log.count == 2
    assert [str(w.message) for w in others] == ["another matter"]
    assert warnings.showwarning is shown and list(warnings.filters) == filters
    assert "synchronize" in vars(runtime.event_class)


def test_a_sync_outside_any_torch_call_is_found_too() -> None:
    runtime, live = probe()
    with syncs.record(probes=(live,)) as log:
        runtime.sync()
    assert [(f.kind, f.micros) for f in log.findings] == [("other", 0.0)]


def backward_with(thread: Callable[[], Any]) -> None:
    """A backward pass, during which ``thread`` runs another thread, as autograd runs the operations of a device."""
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: thread())
    x.sum().backward()


def warned_in_a_thread() -> None:
    """A sync on a thread that runs no line of the user's."""
    thread = threading.Thread(target=warnings.warn, args=(MESSAGE, UserWarning, 1))
    thread.start()
    thread.join()


def test_waits_on_autograds_thread_are_those_of_the_region_that_called_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, live = probe()
    with syncs.record(probes=(live,)) as log:
        backward_with(lambda: in_thread(runtime.sync))
    assert log.count == 0, "a thread that runs no backward pass is somebody else's"
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    with syncs.record(probes=(live,)) as log, syncs.allowed("known"):
        backward_with(lambda: in_thread(runtime.sync))
    assert [(f.kind, f.call, f.reason) for f in log.findings] == [("other", "backward", "known")]
    with syncs.record(probes=(live,)) as log:
        backward_with(warned_in_a_thread)
        warned_in_a_thread()
    assert [f.site.function for f in log.findings] == ["backward_with"]
    with pytest.raises(syncs.SyncError) as caught, syncs.forbid(probes=(live,)):
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda _: (_ for _ in ()).throw(in_thread(runtime.sync) or AssertionError("silent")))
        x.sum().backward()
    assert "Cure" in str(caught.value)


def test_of_several_backward_passes_waits_are_those_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the one before it, once the newest has ended."""
    runtime, live = probe()
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    inside, over = threading.Event(), threading.Event()

    def second() -> None:
        with syncs.record(probes=(live,)) as log:

            def meanwhile() -> None:
                inside.set()
                assert over.wait(30)

            backward_with(meanwhile)
        found.append(log.count)

    found: list[int] = []

    def first() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        assert inside.wait(30)
        in_thread(runtime.sync)
        over.set()
        thread.join()
        in_thread(runtime.sync)
        in_thread(runtime.sync)

    with syncs.record(probes=(live,)) as log:
        backward_with(first)
    assert (found, log.count) == ([1], 2)


def test_calls_that_a_card_has_shown_to_wait_unheard() -> None:
    runtime = FakeRuntime()
    cumsum: list[Any] = ["dim=", False, ["0>0", True, False]]
    live = LiveProbe(runtime, unheard={"Tensor.sort": True, "torch.cummax": True, "torch.cumsum": cumsum})
    device = device_tensor(runtime, 2.0, 1.0)
    with syncs.record(probes=(live,)) as log:
        device.sort()
        torch.tensor([2.0, 1.0]).sort()  # the host's
        torch.cumsum(device, 0)
        torch.cumsum(device, dim=0)  # other kinds of arguments
        torch.cumprod(device, 0)
        torch.cummax(input=device, dim=0)  # the tensor by name
        torch.cummax(input=torch.tensor([2.0, 1.0]), dim=0)
    assert {(f.call, f.count) for f in log.findings} == {("Tensor.sort", 1), ("torch.cumsum", 1), ("torch.cummax", 1)}


def test_the_table_of_unheard_waits_knows_what_the_card_did() -> None:
    known = unheard_calls()
    for call, kinds, waits in (
        ("Tensor.coalesce", "cuda:float32:2d", True),
        ("torch.functional.fn", "cuda:int64:2d; dim=int; return_counts=False; return_inverse=True", True),
        ("torch.functional.fn", "cuda:int64:1d; dim=None; return_counts=False; return_inverse=True", False),
        ("torch.matmul", "cuda:float32:2d; cuda:float32:2d", False),
    ):
        assert decide(known.get(call, False), parse(kinds)) is waits, (call, kinds)


def test_guarded_code_compiles() -> None:
    _, live = probe()
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", fullgraph=True)
    with syncs.forbid(probes=(live,)):
        assert compiled(torch.ones(3)).sum().item() == 9.0


def test_a_guard_may_be_off_where_there_is_no_device() -> None:
    _, absent = probe(present=False)
    with pytest.raises(syncs.ProbeError), syncs.forbid(probes=(absent,)):
        pass
    with syncs.forbid(probes=(absent,), required=False) as log:
        torch.ones(2).tolist()
    assert log.probes == [] and log.count == 0
    runtime, live = probe()
    with pytest.raises(syncs.SyncError), syncs.forbid(probes=(live,), required=False):
        device_tensor(runtime, 1.0).item()
