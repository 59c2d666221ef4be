"""Every kind of race is found whatever the seed, also when by luck the work ran in the right order."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headway.device.readback import Readback
from headway.device.sim import RaceError, SimDevice
from headway.device.staging import Staging, StagingRing

SPEEDS = [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.3, 0.3)]


@pytest.fixture(params=SPEEDS, ids=lambda speeds: f"main {speeds[0]}, copies {speeds[1]}")
def device(request: pytest.FixtureRequest) -> Iterator[SimDevice]:
    """Slow and fast streams: what is found must not depend on them."""
    made = SimDevice(3, speeds=request.param)
    made.enter()
    yield made
    made.close()


def finish(device: SimDevice) -> None:
    """Let everything run, as an engine that goes on would."""
    device.wait_idle()
    device.check()


def on_main(device: SimDevice, size: int = 4) -> torch.Tensor:
    with device.main.active():
        return torch.zeros(size, dtype=torch.int32, device=device.torch_device)


class CarelessRing(StagingRing):
    """Hands out its one buffer without asking the fence."""

    def acquire(self) -> Staging:
        return self._free_when_fenced.pop(0) if self._free_when_fenced else super().acquire()


def stage(ring: StagingRing, device: SimDevice, value: int) -> None:
    staging = ring.acquire()
    staging.ints[:] = value
    with device.main.active():
        ring.send(staging, 4)


def test_a_staging_buffer_rewritten_while_a_copy_may_read_it(device: SimDevice) -> None:
    ring = CarelessRing(device, on_main(device))
    with pytest.raises(RaceError, match="rewrote a staging buffer") as caught:
        for value in range(3):
            stage(ring, device, value)
        finish(device)
    assert "device/staging.py" in str(caught.value)


def test_a_staging_buffer_rewritten_and_never_sent_again(device: SimDevice) -> None:
    ring = StagingRing(device, on_main(device))
    staging = ring.acquire()
    with pytest.raises(RaceError, match="rewrote a staging buffer"):
        with device.main.active():
            ring.send(staging, 4)
        staging.ints[2] = 7
        device.check()
        finish(device)


def test_the_ring_itself_is_safe(device: SimDevice) -> None:
    ring, destination = StagingRing(device, on_main(device)), on_main(device)
    for value in range(20):
        stage(ring, device, value)
        with device.main.active():
            destination.add_(ring._destination)
    finish(device)
    assert destination.data_on_device.tolist() == [sum(range(20))] * 4  # type: ignore[attr-defined]


def test_a_readback_read_before_its_event(device: SimDevice) -> None:
    readback = Readback(device, 4)
    source = on_main(device)
    ticket = readback.start(source)
    with pytest.raises(RaceError, match="the host reads a page-locked buffer"):
        ticket._buffer.numpy()


def test_a_readback_buffer_is_poison_until_its_copy_has_run() -> None:
    with SimDevice(0, speeds=(0.0, 0.0)) as device:
        readback = Readback(device, 4)
        ticket = readback.start(on_main(device))
        view = ticket.wait()
        assert view.tolist() == [0] * 4
        ticket.release()
        with device.main.active():
            source = torch.full((4,), 9, dtype=torch.int32, device=device.torch_device)
        again = readback.start(source)
        assert view.tolist() == [device.timeline.poison_int] * 4, "the old view sees the new copy's poison"
        assert again.wait().tolist() == [9] * 4


def test_a_readback_buffer_given_back_before_its_copy_was_awaited(device: SimDevice) -> None:
    readback = Readback(device, 4)
    source = on_main(device)
    readback.start(source).release()
    with pytest.raises(RaceError, match="the host writes a page-locked buffer"):
        readback.start(source)


def test_the_readback_itself_is_safe(device: SimDevice) -> None:
    readback = Readback(device, 4)
    counter = on_main(device)
    tickets = []
    for _ in range(5):
        with device.main.active():
            counter.add_(1)
            tickets.append(readback.start(counter.clone()))
        if len(tickets) > 2:
            ticket = tickets.pop(0)
            ticket.wait()
            ticket.release()
    finish(device)


def test_a_copy_of_memory_that_main_goes_on_writing(device: SimDevice) -> None:
    readback = Readback(device, 4)
    counter = on_main(device)
    with pytest.raises(RaceError, match="nothing orders the two") as caught:
        for _ in range(2):
            readback.start(counter)
            with device.main.active():
                counter.add_(1)
        finish(device)
    assert "counter.add_(1)" in str(caught.value) and "device/readback.py" in str(caught.value), "both lines"


def test_another_stream_without_an_event(device: SimDevice) -> None:
    with pytest.raises(RaceError, match="nothing orders the two"):
        source = on_main(device)
        with device.copies.active():
            source.add_(1)
        finish(device)


def test_another_stream_behind_an_event(device: SimDevice) -> None:
    source, event = on_main(device), device.new_event()
    event.record(device.main)
    device.copies.wait_event(event)
    with device.copies.active():
        source.add_(1)
    event.record(device.copies)
    event.synchronize()
    assert source.data_on_device.tolist() == [1] * 4  # type: ignore[attr-defined]


def test_an_event_recorded_too_early(device: SimDevice) -> None:
    source, event = on_main(device), device.new_event()
    event.record(device.main)
    with pytest.raises(RaceError, match="nothing orders the two"):
        with device.main.active():
            source.add_(1)
        device.copies.wait_event(event)
        with device.copies.active():
            source.add_(1)
        finish(device)


def test_the_default_stream_is_a_stream_too(device: SimDevice) -> None:
    with pytest.raises(RaceError, match="default"):
        source = torch.zeros(4, device=device.torch_device)
        with device.main.active():
            source.add_(1)
        finish(device)


def test_reads_do_not_race_and_views_share_memory(device: SimDevice) -> None:
    whole = on_main(device, 8)
    device.wait_idle()
    with device.main.active():
        left = whole[:4].add_(1)
    with device.copies.active():
        right = whole[4:].add_(1)
    finish(device)
    assert left.shape == right.shape
    with device.main.active():
        whole.sum()
    with device.copies.active():
        whole.sum()
    finish(device)
    with device.main.active():
        whole[:5].add_(1)
    with pytest.raises(RaceError):
        with device.copies.active():
            whole.view(2, 4)[1].add_(1)
        finish(device)


def test_memory_dropped_while_another_stream_uses_it(device: SimDevice) -> None:
    def start() -> None:
        source, event = on_main(device), device.new_event()
        event.record(device.main)
        device.copies.wait_event(event)
        with device.copies.active():
            device.host_ints(4).copy_(source, non_blocking=True)

    with pytest.raises(RaceError, match=r"free|freed"):
        start()
        gc.collect()
        finish(device)


def test_memory_dropped_after_the_host_waited_is_fine(device: SimDevice) -> None:
    readback = Readback(device, 4)
    ticket = readback.start(on_main(device))
    assert np.array_equal(ticket.wait(), np.zeros(4, np.int32))
    ticket.release()
    del ticket
    gc.collect()
    finish(device)


def test_dropped_memory_is_poison(lazy: SimDevice) -> None:
    with lazy.main.active():
        tensor = torch.zeros(4, device=lazy.torch_device)
        behind = tensor.data_on_device  # type: ignore[attr-defined]
        result = tensor + 1
        del tensor
    lazy.wait_idle()
    assert bool(behind.isnan().all())
    assert result.data_on_device.tolist() == [1.0] * 4  # type: ignore[attr-defined]
