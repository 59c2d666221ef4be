"""Two halves of a step take turns on the host, and their exchanges overlap on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headway.device.sim import SimDevice
from headway.device.sim.errors import SimError
from headway.parallel.group import RankGroup
from headway.parallel.turns import Turns
from tests.kernels.test_collectives import Echo

LAYERS = 3


@contextmanager
def ranks(seed: int) -> Iterator[tuple[SimDevice, RankGroup]]:
    with SimDevice(seed) as device:
        group = RankGroup(Echo(), 0, 2)
        group.turns = Turns(device)
        with device.main.active(), torch.inference_mode():
            yield device, group
        device.wait_idle()
        group.close()


def half(group: RankGroup, x: torch.Tensor, seen: list[str], name: str) -> Callable[[], torch.Tensor]:
    """Layers with two exchanges each; memory of all sizes comes and goes."""

    def run() -> torch.Tensor:
        y = x.clone()
        for _ in range(LAYERS):
            seen.append(name)
            y = group.all_reduce(y * 1.5)
            y = y + group.all_gather(x).sum(0)
        return y

    return run


def expected(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(LAYERS):
        y = 3.0 * y + 2.0 * x
    return y


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("graph", [False, True])
def test_halves_take_turns(seed: int, graph: bool) -> None:
    seen: list[str] = []
    with ranks(seed) as (device, group):
        assert group.turns is not None
        values = torch.arange(8, device=device.torch_device).float().view(2, 4)
        result: Any = torch.zeros(8, device=device.torch_device)
        halves = [half(group, x, seen, name) for x, name in zip(values.unbind(0), "ab", strict=True)]

        def body() -> None:
            assert group.turns is not None
            result.copy_(torch.cat(group.turns.run(halves[0], halves[1])))

        if graph:
            captured = device.capture(body)
            captured.replay()
            values += 1.0
            captured.replay()
        else:
            body()
    at = torch.arange(8).float()
    assert torch.equal(result.data_on_device, expected(at + 1.0 if graph else at))
    assert seen == ["a", "b"] * LAYERS, "each exchange hands the turn over, and there are two a layer"


def test_exchanges_leave_the_main_stream() -> None:
    """While the sums of one half wait for other ranks, the other half is computed."""
    with ranks(0) as (device, group):
        assert group.turns is not None
        x = torch.ones(4, device=device.torch_device)
        group.turns.run(half(group, x, [], "a"), half(group, x, [], "b"))
        queued = {
            stream.name: [getattr(each, "name", "") for each in stream.queue] for stream in device.timeline.streams
        }
        assert not any("all_" in name for name in queued["main"])
        group.all_reduce(x)
        assert "all_reduce_" in [getattr(each, "name", "") for each in device.timeline.main.queue], "of whole steps"


@pytest.mark.parametrize("at", ["a", "b"])
def test_an_error_of_either_half_ends_both(at: str) -> None:
    with ranks(1) as (device, group):
        assert group.turns is not None
        x = torch.ones(4, device=device.torch_device)

        def fails() -> torch.Tensor:
            group.all_reduce(x.clone())
            raise ValueError("broken")

        good = half(group, x, [], "c")
        for _ in range(2):  # nothing is left behind
            with pytest.raises(ValueError, match="broken"):
                group.turns.run(*((fails, good) if at == "a" else (good, fails)))
        group.turns.run(good, good)


def test_a_capture_must_end_with_all_its_streams() -> None:
    with SimDevice(0) as device:
        side, event = device.new_stream(), device.new_event()
        x = torch.ones(4, device=device.torch_device)

        def forgets() -> None:
            event.record(device.main)
            side.wait_event(event)
            with side.active():
                x.add_(1.0)

        def strays() -> None:
            with side.active():
                x.add_(1.0)

        with pytest.raises(SimError, match="nothing waits for"):
            device.capture(forgets)
        with pytest.raises(SimError, match="does not follow the capture"):
            device.capture(strays)
        device.timeline.violations.clear()
