"""The driver boundary without a driver: a fake cupti module, and a trace as torch.profiler writes them."""

from __future__ import annotations

import enum
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import syncs
from headway.syncs.cupti_probe import CuptiProbe
from headway.syncs.driver import blocking, plain
from headway.syncs.live import ANNOTATION
from headway.syncs.trace import END, PROOF, read
from tests.syncs.fake import device_tensor, probe

Cbid = enum.IntEnum("Cbid", {"cudaStreamSynchronize_v3020": 1, "cudaLaunchKernel_v7000": 2})


class Site(enum.IntEnum):
    API_ENTER = 0
    API_EXIT = 1


class FakeCupti(types.ModuleType):
    """Calls back for call(); ``busy`` refuses, ``silent`` never calls back."""

    def __init__(self, busy: bool = False, silent: bool = False) -> None:
        super().__init__("cupti.cupti")
        self.busy, self.silent = busy, silent
        self.callback: Any = None
        self.enabled: list[int] = []
        self.CallbackDomain = types.SimpleNamespace(RUNTIME_API=2, DRIVER_API=1)
        self.RuntimeApiTraceCbid, self.DriverApiTraceCbid, self.ApiCallbackSite = Cbid, (), Site

    def subscribe(self, callback: Any, userdata: Any) -> int:
        if self.busy:
            raise RuntimeError("MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        self.callback = callback
        return 7

    def unsubscribe(self, subscriber: int) -> None:
        self.callback = None

    def enable_callback(self, on: int, subscriber: int, domain: int, cbid: int) -> None:
        self.enabled.append(cbid)

    def call(self, *names: str) -> None:
        """Nested calls."""
        if self.callback is None or self.silent or not names:
            return
        for site in (Site.API_ENTER, Site.API_EXIT):
            data = types.SimpleNamespace(
                callback_site=site, correlation_id=1, function_name=names[0], function_params=0
            )
            self.callback(None, 2, 1, data)
            if site is Site.API_ENTER:
                self.call(*names[1:])


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    return install(monkeypatch, FakeCupti())


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeCupti) -> FakeCupti:
    monkeypatch.setitem(sys.modules, "cupti", types.ModuleType("cupti"))
    monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.call("cudaDeviceSynchronize"))
    return fake


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


def test_a_forbidden_wait_in_a_callback_is_raised_outside_the_driver(cupti: FakeCupti) -> None:
    with pytest.raises(syncs.SyncError), syncs.forbid(probes=(CuptiProbe(),)):
        cupti.call("cudaStreamSynchronize")


@pytest.mark.parametrize(("fault", "says"), [("busy", "busy"), ("silent", "no callback")])
def test_a_blind_probe_is_an_error(monkeypatch: pytest.MonkeyPatch, fault: str, says: str) -> None:
    install(monkeypatch, FakeCupti(**{fault: True}))
    with pytest.raises(syncs.ProbeError, match=says), syncs.record(probes=(CuptiProbe(),)):
        pass


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 9, "ts": ts, "dur": dur, "args": args}


def test_a_trace_is_read() -> None:
    line = ANNOTATION + json.dumps(["/u/a.py", 12, "step", "Tensor.item"])
    here = str(Path(__file__))
    trace = read(
        {
            "traceEvents": [
                event("user_annotation", PROOF, 0, 10),
                event("cuda_runtime", "cudaDeviceSynchronize", 1, 8),
                event("cuda_runtime", "cudaStreamSynchronize", 9.5, 0.1),  # the other probes' set-up
                event("user_annotation", line, 20, 30),
                event("cuda_runtime", "cudaStreamSynchronize", 25, 20),
                event("python_function", f"{here}(40): outer", 60, 40),
                event("python_function", "torch/nn/x.py(3): forward", 61, 30),
                event("cuda_driver", "cuStreamSynchronize", 65, 5),
                event("cuda_runtime", "cudaMemcpyAsync", 75, 2, correlation=5),
                event("cuda_runtime", "cudaMemcpyAsync", 78, 2, correlation=6),
                event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 76, 3, correlation=5, device=0, stream=7),
                event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 80, 3, correlation=6, device=0, stream=7),
                event("user_annotation", END, 110, 10),
                event("cuda_runtime", "cudaDeviceSynchronize", 111, 8),
            ]
        }
    )
    assert trace.proven and trace.begin == 10
    found = [(str(wait.kind), wait.call, wait.micros, wait.site.line) for wait in trace.waits]
    assert found[0] == ("stream", "cudaStreamSynchronize", 20.0, 12)
    assert [row[:2] for row in found[1:]] == [("stream", "cuStreamSynchronize"), ("pageable", "cudaMemcpyAsync")]
    assert len(trace.streams["GPU 0, stream 7"]) == 2


def test_a_trace_without_the_proof_is_unproven() -> None:
    assert not read({"traceEvents": [event("cpu_op", "aten::add", 0, 1)]}).proven
