"""Waits in the loop: forbidden ones stop the engine, counted ones reach the statistics, back-pressure is neither."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headway.core.errors import ConfigError
from headway.device.cpu import CpuDevice
from headway.device.readback import Readback
from headway.device.sim import SimDevice
from headway.engine import host_waits
from headway.engine.core import EngineCore
from headway.engine.host_waits import HostWaits
from headway.runner.runner import ModelRunner
from headway.sampling.sampler import Sampler
from headway.syncs import SyncError
from tests.engine.harness import MakeEngine, drain, request
from tests.gpu.guard import no_waits
from tests.syncs.fake import FakeRuntime, device_tensor, probe


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def counted(make_engine: MakeEngine, runtime: FakeRuntime) -> Iterator[EngineCore]:
    """An engine whose waits are counted, on a pretended CUDA runtime."""
    core = make_engine(run_ahead=2)
    device: Any = SimDevice(0)
    core._waits = HostWaits(device, runtime)
    yield core
    core._waits.close()
    core._waits.close()
    assert runtime.mode == [False, True, False], "torch is left as it was"


def waiting_launch(monkeypatch: pytest.MonkeyPatch, *calls: Any) -> None:
    launch = ModelRunner.launch

    def careless(self: ModelRunner, *given: Any) -> Any:
        for call in calls:
            call()
        return launch(self, *given)

    monkeypatch.setattr(ModelRunner, "launch", careless)


def test_no_wait_is_an_empty_count_and_not_counting_is_none(counted: EngineCore, make_engine: MakeEngine) -> None:
    counted.add(request("a", [1, 2, 3]))
    drain(counted)
    assert counted.stats().host_waits == {}
    assert make_engine().stats().host_waits is None


def test_waits_are_counted_by_kind(counted: EngineCore, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    x, event = device_tensor(runtime, 1.0), runtime.event_class()
    waiting_launch(monkeypatch, x.item, event.synchronize)
    counted.add(request("a", [1, 2, 3], ignore_eos=True, max_tokens=3))
    drain(counted)
    steps = counted.stats().num_steps
    assert steps >= 3 and counted.stats().host_waits == {"other": steps, "event": steps}
    assert "test_host_waits.py" in counted._waits.text()  # type: ignore[union-attr]


def test_waits_outside_the_loop_and_on_other_threads_are_not_the_engines(
    counted: EngineCore, runtime: FakeRuntime
) -> None:
    device_tensor(runtime, 1.0).item()
    runtime.event_class().synchronize()
    assert counted.stats().host_waits == {}


def test_filters_of_others_do_not_blind_it(
    counted: EngineCore, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = device_tensor(runtime, 1.0)
    waiting_launch(monkeypatch, x.item)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted.add(request("a", [1, 2, 3], max_tokens=1))
        drain(counted)
    assert counted.stats().host_waits == {"other": counted.stats().num_steps}


def test_back_pressure_is_sanctioned(counted: EngineCore, runtime: FakeRuntime) -> None:
    class Late:
        """A copy that is done when somebody waits for it."""

        def __init__(self) -> None:
            self.event = runtime.event_class()

        def record(self, stream: Any) -> None:
            self.event.left = 10

        def query(self) -> bool:
            return bool(self.event.left == 0)

        def synchronize(self) -> None:
            self.event.synchronize()

    device = CpuDevice()
    device.new_event = lambda timing=False: Late()  # type: ignore[assignment, return-value]
    readback = Readback(device, 4)
    assert counted._waits is not None
    with counted._waits.watching() as log:
        readback.start(torch.arange(4, dtype=torch.int32)).wait()
    (finding,) = log.sanctioned
    assert finding.count == 1 and "back-pressure" in str(finding.reason)
    assert counted.stats().host_waits == {} and readback.back_pressure.waits == 1


@pytest.mark.parametrize("fault", ["synchronous", "no CUDA"])
def test_it_is_refused_where_nothing_could_be_seen(fault: str) -> None:
    device: Any = CpuDevice() if fault == "synchronous" else SimDevice(0)
    with pytest.raises(ConfigError, match="leave it off"):
        HostWaits(device, FakeRuntime(present=False))


def test_the_argument_reaches_the_engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="count_host_waits"):
        make_engine(count_host_waits=True)
    assert host_waits.HostWaits is HostWaits


def test_a_forbidden_wait_in_a_launch_stops_the_engine(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the GPU tests are guarded."""
    runtime, live = probe()
    x, core, call = device_tensor(runtime, 1.0), make_engine(run_ahead=2), Sampler.__call__

    def reading(self: Sampler, logits: torch.Tensor, slots: torch.Tensor, *others: Any) -> Any:
        x.item()
        return call(self, logits, slots, *others)

    with no_waits(monkeypatch, (live,), torch_too=False) as launches:
        core.add(request("a", [1, 2, 3]))
        drain(core)
        assert launches[0] == core.stats().num_steps
        monkeypatch.setattr(Sampler, "__call__", reading)
        core.add(request("b", [1, 2, 3]))
        with pytest.raises(SyncError, match=r"test_host_waits\.py:\d+"):
            drain(core)
        core.abort("b")
