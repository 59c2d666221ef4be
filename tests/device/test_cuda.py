"""What a CUDA device asks of torch and of the driver: the calls, their arguments and their order, on a runtime that writes them
down. ``tests/gpu`` says that a card does as it is asked."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from headway.core.errors import ConfigError
from headway.device.base import DeviceError
from headway.device.cpu import CpuDevice, CpuEvent
from headway.device.cuda import CudaDevice, CudaEvent, CudaGraph, CudaStream
from headway.device.select import select_device

Called = list[tuple[Any, ...]]


class Raw:
    """A stream, an event or a graph of torch's: it writes down what it is asked."""

    def __init__(self, called: Called, *made: Any) -> None:
        self._called, self.made, self.answer = called, made, 0.0
        self.cuda_stream = 77

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self._called.append((self, name, *arguments))
            return self.answer

        return ask


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    calls: Called = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(cuda, "Stream", lambda device: Raw(calls, "stream", device))
    monkeypatch.setattr(cuda, "Event", lambda *, enable_timing, blocking: Raw(calls, "event", enable_timing, blocking))
    monkeypatch.setattr(cuda, "CUDAGraph", lambda *, keep_graph: Raw(calls, "graph", keep_graph))
    for name in ("mem_get_info", "max_memory_allocated", "reset_peak_memory_stats", "synchronize", "stream"):
        answer = {"mem_get_info": (3, 8), "max_memory_allocated": 5}.get(name, nullcontext())

        def ask(what: Any, name: str = name, answer: Any = answer) -> Any:
            calls.append((name, what))
            return answer

        monkeypatch.setattr(cuda, name, ask)

    def graph(raw: Raw, *, pool: str, stream: Raw, capture_error_mode: str) -> Any:
        calls.append(("capture", raw, pool, stream, capture_error_mode))
        return nullcontext()

    monkeypatch.setattr(cuda, "graph", graph)
    empty, zeros = torch.empty, torch.zeros

    def unpinned(make: Any) -> Any:
        def made(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            calls.append((make.__name__, size, pin_memory))
            found: torch.Tensor = make(*size, **more)
            return found

        return made

    monkeypatch.setattr(torch, "empty", unpinned(empty))
    monkeypatch.setattr(torch, "zeros", unpinned(zeros))
    return calls


def test_which_card(called: Called) -> None:
    for name, index in (("auto", 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)):
        device = select_device(name)
        assert isinstance(device, CudaDevice) and device.torch_device == torch.device("cuda", index)
    for name in ("cuda:2", "cuda:3"):
        with pytest.raises(ConfigError, match=f"device='{name}', but there are only 2 GPUs"):
            select_device(name)
    assert isinstance(select_device("cpu"), CpuDevice)


def test_three_streams_of_its_own(called: Called) -> None:
    device = CudaDevice(torch.device("cuda:0"))
    streams: list[Any] = [device.main, device.copies, device.clock, device.new_stream()]
    assert len({id(each.raw) for each in streams}) == 4
    assert all(each.raw.made == ("stream", torch.device("cuda", 0)) for each in streams)
    assert (device.asynchronous, device.captures_graphs, device.compiles_kernels) == (True, True, True)
    assert streams[0].active() is streams[0].raw
    with device.joined():
        assert called[-1] == ("stream", streams[0].raw)
    device.close()


def test_events(called: Called) -> None:
    """They spin, and take times only where they are asked to; times are told in microseconds."""
    device: Any = CudaDevice(torch.device("cuda:0"))
    plain: Any = device.new_event()
    timed: Any = device.new_event(timing=True)
    assert {type(plain), type(timed)} == {CudaEvent} and {type(device.main)} == {CudaStream}
    assert plain.raw.made == ("event", False, False) and timed.raw.made == ("event", True, False)
    called.clear()
    timed.record(device.main)
    device.main.wait_event(plain)
    plain.synchronize()
    assert called == [
        (timed.raw, "record", device.main.raw),
        (device.main.raw, "wait_event", plain.raw),
        (plain.raw, "synchronize"),
    ]
    timed.raw.answer = 1.5
    assert timed.elapsed_us(plain) == 1500.0 and called[-1] == (timed.raw, "elapsed_time", plain.raw)
    assert timed.query() is True and plain.query() is False


def test_pinned_memory(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(torch.device("cuda:0"))
    assert device.pins_memory and device.notes == [] and ("empty", (1,), True) in called
    ints = device.host_ints(3)
    assert ints.tolist() == [0, 0, 0] and ints.dtype == torch.int32 and called[-1] == ("zeros", (3,), True)

    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot pin\nmore of it")

    monkeypatch.setattr(torch, "empty", refuses)
    device = CudaDevice(torch.device("cuda:0"))
    assert not device.pins_memory
    assert device.notes == ["no pinned host memory (cannot pin): host-device copies will block"]
    device.host_ints(3)
    assert called[-1] == ("zeros", (3,), False)


def test_memory(called: Called) -> None:
    device = CudaDevice(torch.device("cuda:1"))
    called.clear()
    assert device.memory_bytes() == (3, 8) and device.peak_bytes() == 5
    device.reset_peak()
    device.wait_idle()
    names = ("mem_get_info", "max_memory_allocated", "reset_peak_memory_stats", "synchronize")
    assert called == [(name, torch.device("cuda", 1)) for name in names]


@pytest.mark.parametrize("reused", [False, True])
def test_graphs(reused: bool, called: Called) -> None:
    """Captured on the main stream, all in one pool; one that is to be part of others is kept, and made ready by itself."""
    device: Any = CudaDevice(torch.device("cuda:0"))
    called.clear()
    graph = device.capture(lambda: called.append(("body",)), reused=reused)
    captured, body, *rest = called
    raw = captured[1]
    assert captured == ("capture", raw, "pool", device.main.raw, "thread_local") and body == ("body",)
    assert raw.made == ("graph", reused) and rest == ([(raw, "instantiate")] if reused else [])
    graph.replay()
    assert called[-1] == (raw, "replay")


class Driver:
    """libcuda: it fails at the ``fails``-th call."""

    def __init__(self, called: Called, fails: int = 0) -> None:
        self._called, self._fails = called, fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self._called.append((name, [getattr(each, "value", each) for each in arguments]))
            if name == "cuStreamGetCaptureInfo_v2":
                arguments[3]._obj.value, arguments[4]._obj.value, arguments[5]._obj.value = 501, 502, 3
            if name == "cuGraphAddChildGraphNode":
                arguments[0]._obj.value = 601
            return 9 if len(self._called) == self._fails else 0

        return call


def test_a_graph_within_a_graph(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked as its header says: a child node behind what was captured, then the stream goes on behind that."""
    device: Any = CudaDevice(torch.device("cuda:0"))
    part = Raw(called, "graph", True)
    part.answer = 88
    said: Called = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(said) if name == "libcuda.so.1" else None)
    device.capture(lambda: said.append(("body",)), first=CudaGraph(part))  # type: ignore[arg-type]
    info, child, update, body = said
    assert info[0] == "cuStreamGetCaptureInfo_v2" and info[1][0] == 77 and len(info[1]) == 6
    assert child[0] == "cuGraphAddChildGraphNode" and child[1][1:] == [501, 502, 3, 88]
    assert update[0] == "cuStreamUpdateCaptureDependencies" and update[1][0] == 77 and update[1][2:] == [1, 1]
    assert body == ("body",), "behind the first part"
    for fails in (1, 2, 3):
        said.clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda _, fails=fails: Driver(said, fails))
        with pytest.raises(DeviceError, match="CUDA error 9"):
            device.capture(lambda: None, first=CudaGraph(part))  # type: ignore[arg-type]
        assert len(said) == fails, "nothing is asked behind a failure"


def test_a_cpu_has_nothing_to_wait_for() -> None:
    device = CpuDevice()
    event = device.new_event()
    assert isinstance(event, CpuEvent) and event.query() and event.elapsed_us(device.new_event()) == 0.0
    assert (device.asynchronous, device.captures_graphs, device.compiles_kernels, device.pins_memory) == (False,) * 4
    assert device.clock is None and device.peak_bytes() == 0 and device.host_ints(2).tolist() == [0, 0]
    free, total = device.memory_bytes()
    assert 0 < free <= total
    with pytest.raises(NotImplementedError):
        device.capture(lambda: None)
