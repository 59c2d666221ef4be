"""The device's times of steps: right on the simulated device's virtual clock, and never read early."""

from __future__ import annotations

import pytest
import torch

from headway.device.sim import HostSyncError, SimDevice
from headway.device.sim.errors import SimError
from headway.device.sim.timeline import SimEvent
from headway.device.step_clock import StepClock, StepEvents


def work(device: SimDevice, clock: StepClock, operations: int) -> StepEvents:
    """A step of ``operations``, launched."""
    with device.main.active():
        events = clock.submit()
        assert events is not None
        value = torch.zeros(4, dtype=torch.int32, device=device.torch_device)
        for _ in range(operations):
            value += 1
    events.ended.record(device.main)
    return events


def test_the_clock_tells_lead_idleness_and_work(lazy: SimDevice) -> None:
    clock = StepClock(lazy)
    first, second = work(lazy, clock, 20), work(lazy, clock, 30)
    lazy.wait_idle()
    start, overlapped = clock.measure(first), clock.measure(second)
    assert start is not None and overlapped is not None
    assert start.busy >= 20 and start.headway == start.idle == 0
    assert overlapped.headway >= 20 and overlapped.idle == 0 and overlapped.busy >= 30
    lazy.timeline.num_executed += 500
    third = work(lazy, clock, 10)
    lazy.wait_idle()
    dry = clock.measure(third)
    assert dry is not None and dry.headway == 0 and dry.idle >= 500 and 10 <= dry.busy < 100
    assert work(lazy, clock, 1) in (first, second), "events are used again"


@pytest.mark.parametrize("which", ["ended", "submitted"])
def test_reading_a_time_early_is_refused(lazy: SimDevice, which: str) -> None:
    clock = StepClock(lazy)
    events = work(lazy, clock, 3)
    if which == "submitted":
        lazy.wait_idle()
    else:
        assert events.submitted.query()
    with pytest.raises(HostSyncError, match="does not know to have passed"):
        events.submitted.elapsed_us(events.ended)
    lazy.timeline.violations.clear()
    lazy.wait_idle()


def test_an_event_without_timing_has_no_time(lazy: SimDevice) -> None:
    event = lazy.new_event()
    assert isinstance(event, SimEvent)
    event.record(lazy.main)
    lazy.wait_idle()
    with pytest.raises(SimError, match="without timing"):
        event.elapsed_us(event)
    lazy.timeline.violations.clear()
