"""The driver boundary without a driver: a fake cupti module."""

from __future__ import annotations

import _thread
import importlib.util
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import syncs_sweep
from headway import syncs
from headway.syncs import frames, places
from headway.syncs.counting import CallCounter, direction
from headway.syncs.cupti_api import parameters
from headway.syncs.cupti_probe import CuptiProbe
from headway.syncs.driver import blocking, plain
from headway.syncs.regions import PROCESS
from tests.syncs.fake import device_tensor, probe
from tests.syncs.fake_cupti import CallbackData, CopyCall, FakeCupti, Site, install
from tests.syncs.run_corpus import driver_boundary, driver_log


@pytest.fixture(params=["13.0", "13.4"])
def cupti(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeCupti:
    return install(monkeypatch, FakeCupti(old=request.param == "13.0"))


def test_names() -> None:
    assert plain("cudaStreamSynchronize_ptsz_v7000") == "cudaStreamSynchronize" == plain("cudaStreamSynchronize_v3020")
    assert plain("cuMemcpyDtoH_v2") == "cuMemcpyDtoH"
    assert blocking("cuCtxSynchronize") is syncs.Kind.DEVICE and blocking("cudaLaunchKernel") is None


def test_an_extensions_wait_is_found_once(cupti: FakeCupti) -> None:
    with syncs.record(probes=(CuptiProbe(),)) as log:
        cupti.call("cudaStreamSynchronize", "cuStreamSynchronize")  # the runtime calls the driver
        cupti.call("cudaLaunchKernel")
    (finding,) = log.findings
    assert (finding.call, finding.kind, finding.count) == ("cudaStreamSynchronize", "stream", 1)
    assert cupti.enabled == [1] and cupti.callback is None


def test_a_torch_calls_driver_wait_counts_once(cupti: FakeCupti) -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    warn = runtime.sync

    def sync() -> None:
        warn()
        cupti.call("cudaStreamSynchronize")

    runtime.sync = sync  # type: ignore[method-assign]
    with syncs.record(probes=(live, CuptiProbe())) as log:
        x.item()
    assert [(f.call, f.count) for f in log.findings] == [("Tensor.item", 1)]


def test_an_extensions_wait_is_not_charged_to_another_threads_call(cupti: FakeCupti) -> None:
    runtime, live = probe()
    x = device_tensor(runtime, 1.0)
    found: list[tuple[str, int]] = []

    def extension() -> None:
        with syncs.record(probes=(CuptiProbe(),)) as log:
            cupti.call("cudaStreamSynchronize")
        found.extend((finding.call, finding.count) for finding in log.findings)

    def sync() -> None:  # inside of item(): the other thread runs from begin to end meanwhile
        other = threading.Thread(target=extension)
        other.start()
        other.join()

    with syncs.record(probes=(live,)) as log:
        runtime.sync = sync  # type: ignore[method-assign]
        x.item()
    assert found == [("cudaStreamSynchronize", 1)] and not log.findings


def test_a_forbidden_wait_in_a_callback_is_raised_outside_the_driver(cupti: FakeCupti) -> None:
    with pytest.raises(syncs.SyncError), syncs.forbid(probes=(CuptiProbe(),)):
        cupti.call("cudaStreamSynchronize")


def test_pageable_copies_are_told_from_pinned_ones(cupti: FakeCupti) -> None:
    with syncs.record(probes=(CuptiProbe(),)) as log:
        cupti.call("cudaMemcpyAsync", "cuMemcpyHtoDAsync_v2", copy=CopyCall(8, 9, 4, 1, None))
        assert not log.findings
        cupti.call("cudaMemcpyAsync", copy=CopyCall(8, 5000, 4, 1, None))
    assert [(f.call, str(f.kind)) for f in log.findings] == [("cudaMemcpyAsync", "pageable")]


def test_parameters_are_not_taken_from_a_struct_of_another_shape() -> None:
    data = CallbackData(Site.API_EXIT, "cudaMemcpyAsync", 4096)
    assert parameters(data) == 4096
    data.correlation_id = 98
    assert parameters(data) == 0


@pytest.mark.skipif(importlib.util.find_spec("cupti") is None, reason="needs cupti-python")
def test_the_installed_release_gives_the_place_of_its_struct() -> None:
    module = pytest.importorskip("cupti.cupti")
    ours = CallbackData(Site.API_EXIT, "cudaMemcpyAsync", 4096)
    theirs = module.CallbackData.from_ptr(ours.ptr)
    assert (theirs.function_name, theirs.correlation_id) == ("cudaMemcpyAsync", 99)
    assert parameters(theirs) == 4096


def test_calls_are_counted_per_thread_and_once(cupti: FakeCupti) -> None:
    with CallCounter() as counter:
        assert sorted(cupti.domains) == [1, 2]
        cupti.call("cudaGraphLaunch", "cuGraphLaunch")
        cupti.call("cuLaunchKernelEx")
        cupti.call("cudaMemcpyAsync", copy=CopyCall(1, 2, 4, 1, None))
        cupti.call("cudaMemcpyAsync", copy=CopyCall(1, 2, 4, 2, None))
        cupti.call("cuMemcpyDtoHAsync_v2")
        cupti.call("cudaEventQuery", "cuEventQuery")
        cupti.call("cudaEventSynchronize")
        other = threading.Thread(target=lambda: cupti.call("cudaLaunchKernel"))
        other.start()
        other.join()
        calls = counter.take()
        assert (calls.graph_launches, calls.kernel_launches) == (1, 1)
        assert calls.copies == {"HtoD": 1, "DtoH": 2}
        assert calls.waits == {"cudaEventSynchronize": 1} and calls.others == {"cudaEventQuery": 1}
        assert counter.take().to_dict() == {
            "waits": {}, "copies": {}, "graph_launches": 0, "kernel_launches": 0, "others": {}
        }  # fmt: skip
    assert cupti.callback is None


def test_a_counter_that_hears_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeCupti(silent=True))
    with pytest.raises(syncs.ProbeError, match="not counted"), CallCounter():
        pass
    assert fake.callback is None


def test_a_copy_whose_direction_nobody_tells() -> None:
    assert direction("cudaMemcpyAsync", 0) is None and direction("cuMemcpyAsync", 4096) is None


@pytest.mark.parametrize(("fault", "says"), [("busy", "busy"), ("silent", "no callback")])
def test_a_blind_probe_is_an_error(monkeypatch: pytest.MonkeyPatch, fault: str, says: str) -> None:
    install(monkeypatch, FakeCupti(**{fault: True}))
    with pytest.raises(syncs.ProbeError, match=says), syncs.record(probes=(CuptiProbe(),)):
        pass


def on_a_thread_of_torchs(name: str, work: Callable[[], None]) -> None:
    """Run ``work`` on a thread that ``threading`` did not start, with a name that only the system knows; wait for it."""
    done = _thread.allocate_lock()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        try:
            work()
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(run, ())
    with done:
        pass


def test_the_labeller_hears_autograds_threads_and_no_helpers(cupti: FakeCupti) -> None:
    with syncs.record(probes=(CuptiProbe(),)):
        with driver_log() as kinds:
            cupti.call("cudaStreamSynchronize")
            on_a_thread_of_torchs("pt_autograd_0", lambda: cupti.call("cudaEventSynchronize"))
            on_a_thread_of_torchs("pt_nccl_watchdg", lambda: cupti.call("cudaDeviceSynchronize"))
            pinning = threading.Thread(target=lambda: cupti.call("cudaFreeHost"), name="pin_memory")
            pinning.start()
            pinning.join()
        cupti.call("cudaFree")
    assert kinds == ["stream", "event"]


@pytest.mark.parametrize(("name", "heard"), [("pt_autograd_0", True), ("python", False)])
def test_no_label_is_written_by_a_labeller_that_is_deaf_to_autograd(
    cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch, name: str, heard: bool
) -> None:
    def item(tensor: torch.Tensor) -> float:
        on_a_thread_of_torchs(name, lambda: cupti.call("cudaStreamSynchronize"))
        return 1.0

    monkeypatch.setattr(torch.Tensor, "item", item)
    if heard:
        with driver_boundary("cpu") as detector, detector() as kinds:
            cupti.call("cudaStreamSynchronize")
        assert kinds == ["stream"]
    else:
        with pytest.raises(syncs.ProbeError, match="deliberate wait in a backward pass"), driver_boundary("cpu"):
            pass
    assert cupti.callback is None


def test_the_driver_alone_names_lines(cupti: FakeCupti) -> None:
    def work() -> int:
        cupti.call("cudaStreamSynchronize", "cuStreamSynchronize")
        return 0

    (found,) = syncs_sweep.heard_of(work)
    assert (found["file"], found["kind"], found["count"]) == ("fake_cupti.py", "stream", 1)
    assert cupti.callback is None and not PROCESS.listeners


def test_a_callback_on_a_thread_without_python_has_no_line_of_ours() -> None:
    """NCCL's threads, and the driver's: beneath the callback there is nothing."""
    code = types.SimpleNamespace(co_filename=frames.__file__, co_firstlineno=1, co_qualname="CuptiProbe._account")
    alone: Any = types.SimpleNamespace(f_code=code, f_lineno=105, f_back=None)
    assert frames.locate(alone) == (places.Site("<native thread>", 0, ""), ())
