"""Work runs late and in stream order; views are real views; results are the CPU's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.device.base import Stream
from headway.device.select import select_device
from headway.device.sim import SimDevice, SimError
from headway.device.sim.tensor import SimTensor
from headway.kernels.cap_logits import cap_logits


def value(tensor: torch.Tensor) -> torch.Tensor:
    """What the device holds now; for tests only."""
    assert isinstance(tensor, SimTensor)
    return tensor.data_on_device


def test_nothing_runs_before_somebody_waits(lazy: SimDevice) -> None:
    with lazy.main.active():
        x = torch.arange(4, device=lazy.torch_device)
        y = x * 2
        y[1:3] = 9
    assert value(y).tolist() == [lazy.timeline.poison_int] * 4
    event = lazy.new_event()
    assert event.query(), "before its first recording"
    event.record(lazy.main)
    assert not event.query()
    with lazy.main.active():
        z = y + 1
    event.synchronize()
    assert event.query()
    assert value(y).tolist() == [0, 9, 9, 6]
    assert value(z).tolist() == [lazy.timeline.poison_int] * 4, "queued after the event"
    lazy.wait_idle()
    assert value(z).tolist() == [1, 10, 10, 7]


def test_a_polled_event_passes_in_the_end(lazy: SimDevice) -> None:
    event = lazy.new_event()
    event.record(lazy.main)
    assert sum(not event.query() for _ in range(1000)) > 10
    assert event.query()


def test_uninitialised_memory_is_poison(lazy: SimDevice) -> None:
    floats = torch.empty(3, device=lazy.torch_device)
    assert bool(value(floats).isnan().all())
    assert value(torch.empty_like(floats, dtype=torch.int16)).unique().numel() == 1
    lazy.wait_idle()
    assert bool(value(floats).isnan().all())


def test_a_fast_stream_works_while_the_host_goes_on() -> None:
    """How much is done before anybody waits is the seed's choice: nothing, some of it, or all."""
    done = set()
    for seed in range(8):
        device = SimDevice(seed, speeds=(0.9, 0.9))
        device.enter()
        with device.main.active():
            x = torch.zeros(1, device=device.torch_device)
            for _ in range(6):
                x += 1
        done.add(float(value(x)))
        device.wait_idle()
        assert float(value(x)) == 6.0
        device.close()
    assert len(done & set(map(float, range(7)))) > 1


def test_views_share_memory_and_strides(lazy: SimDevice) -> None:
    base = torch.zeros(4, 6, device=lazy.torch_device)
    columns = base[:, 1::2].t()
    left, right = base.split([2, 4], dim=1)
    assert columns.stride() == (2, 6) and columns.shape == (3, 4) and not columns.is_contiguous()
    columns[0] = 5.0
    left.add_(1)
    right.view(torch.int32)[0] = 7
    flat = base.reshape(-1)
    copied = columns.reshape(-1)
    base[0, 1:2] = 3.0
    lazy.wait_idle()
    assert value(flat)[1] == 3.0 and value(base)[1, 1] == 6.0
    assert value(copied)[0] == 6.0, "a reshape that had to copy"


def test_a_pinned_source_is_read_when_the_copy_runs(lazy: SimDevice) -> None:
    buffer, target = lazy.host_ints(3), torch.zeros(3, dtype=torch.int32, device=lazy.torch_device)
    numbers = buffer.numpy()
    numbers[:] = 1
    target.copy_(buffer, non_blocking=True)
    late = torch.zeros(3, dtype=torch.int32, device=lazy.torch_device)
    late.copy_(target)
    lazy.wait_idle()
    assert value(late).tolist() == [1, 1, 1]


def test_inference_tensors_parameters_and_modules(lazy: SimDevice) -> None:
    layer = torch.nn.Linear(3, 2, device=lazy.torch_device)
    parameter = torch.nn.Parameter(torch.ones(2, 3, device=lazy.torch_device), requires_grad=False)
    layer.weight = parameter
    layer.requires_grad_(False)
    torch.nn.init.zeros_(layer.bias)
    with torch.inference_mode():
        out = layer(torch.full((1, 3), 2.0, device=lazy.torch_device))
        out.add_(1)
    lazy.wait_idle()
    assert value(out).tolist() == [[7.0, 7.0]]
    assert isinstance(parameter, torch.nn.Parameter) and isinstance(parameter, SimTensor)


def random_program(rng: random.Random, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Random operations over two [4, 8] float tensors; the same ones for the same ``rng``."""
    made = [x, y]
    index = (torch.arange(4, device=x.device) * 3) % 4
    for _ in range(30):
        a, b = rng.choice(made), rng.choice(made)
        kind = rng.randrange(12)
        if kind == 0:
            made.append(a + b)
        elif kind == 1:
            a.mul_(0.5)
        elif kind == 2:
            made.append(torch.where(a > 0, b, 0.0))
        elif kind == 3:
            made.append(a.sort(dim=1).values)
        elif kind == 4:
            a[:, 2:5] = b[:, 1:4].clone()
        elif kind == 5:
            made.append(torch.cat([a[:2], b[2:]]))
        elif kind == 6:
            made.append(a.cumsum(1).clamp(-5, 5))
        elif kind == 7:
            made.append((a @ b.t()).repeat(1, 2).tanh())
        elif kind == 8:
            a[index, index] = b[:, 0]
        elif kind == 9:
            made.append(a[:, index].repeat(1, 2))
        elif kind == 10:
            a.copy_(b)
        else:
            made.append(a.view(8, 4).t().reshape(4, 8).contiguous())
    return made


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_the_cpu_results(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(4, 8, generator=generator) for _ in range(2))
    expected = random_program(random.Random(seed), first.clone(), second.clone())
    with SimDevice(seed) as device:
        x, y = first.to(device.torch_device), second.to(device.torch_device)
        with device.main.active(), torch.inference_mode(seed % 2 == 0):
            made = random_program(random.Random(seed), x, y)
        device.wait_idle()
        for mine, theirs in zip(made, expected, strict=True):
            assert value(mine).equal(theirs)


def test_the_seed_decides() -> None:
    def trace(seed: int) -> list[bool]:
        with SimDevice(seed) as device:
            seen = []
            for _ in range(40):
                with device.main.active():
                    torch.zeros(2, device=device.torch_device)
                event = device.new_event()
                event.record(device.main)
                seen.append(event.query())
            return seen

    assert trace(5) == trace(5)
    assert len({tuple(trace(seed)) for seed in range(20)}) > 3


def test_mixing_host_and_device_tensors_is_an_error(lazy: SimDevice) -> None:
    with pytest.raises(RuntimeError, match="device and host tensors"):
        torch.zeros(2, device=lazy.torch_device) + torch.zeros(2)


def test_devices_take_turns() -> None:
    with SimDevice(1) as outer:
        x = torch.zeros(2, device=outer.torch_device)
        with SimDevice(2) as inner:
            y = torch.zeros(2, device=inner.torch_device)
            assert isinstance(y, SimTensor) and y.operations is inner.operations
        z = x + torch.ones(2, device=outer.torch_device)
        outer.wait_idle()
        assert value(z).tolist() == [1.0, 1.0]
    assert type(torch.zeros(2, device="meta")) is torch.Tensor


def test_selected_by_name() -> None:
    device = select_device("sim:7")
    assert isinstance(device, SimDevice) and device.seed == 7
    device.close()
    assert EngineArgs(device="sim:12").device == "sim:12"
    with pytest.raises(ConfigError, match="sim:SEED"):
        EngineArgs(device="sim:x")


def test_graphs_replay_on_the_same_memory(lazy: SimDevice) -> None:
    with lazy.main.active():
        x = torch.zeros(3, device=lazy.torch_device)
    factor, kept = 2.0, []

    def body() -> None:
        temporary = x + 1
        kept.append(temporary * factor)

    graph = lazy.capture(body)
    factor = 100.0
    lazy.wait_idle()
    assert value(x).tolist() == [0.0] * 3 and bool(value(kept[0]).isnan().all()), "a capture runs nothing"
    for start in (1.0, 5.0):
        with lazy.main.active():
            x.fill_(start)
            graph.replay()
        lazy.wait_idle()
        assert value(kept[0]).tolist() == [(start + 1) * 2] * 3
    assert factor == 100.0, "numbers are frozen into the graph"


def test_a_graph_that_reads_memory_that_was_replaced(lazy: SimDevice) -> None:
    """R7: everything a graph reads has a stable address."""
    with lazy.main.active():
        x = torch.zeros(3, device=lazy.torch_device)
    made: list[torch.Tensor] = []

    def body(x: torch.Tensor = x) -> None:
        made.append(x + 1)

    graph = lazy.capture(body)
    del x, body
    with pytest.raises(SimError, match="freed"):
        with lazy.main.active():
            graph.replay()
        lazy.wait_idle()


@pytest.mark.parametrize(
    ("queued", "why"),
    [
        (lambda device: device.new_event().record(device.copies), "event.record inside a graph capture"),
        (lambda device: device.main.wait_event(device.new_event()), "wait_event inside a graph capture"),
        (lambda device: work_on(device, device.copies), "does not follow the capture"),
        (lambda device: forked(device, joins=False), "nothing waits for"),
        (lambda device: device.wait_idle(), "blocks the host"),
    ],
    ids=[
        "a-foreign-stream-records",
        "an-event-of-elsewhere",
        "work-on-a-foreign-stream",
        "never-joined",
        "a-host-wait",
    ],
)
def test_what_captures_refuse(lazy: SimDevice, queued: Callable[[SimDevice], object], why: str) -> None:
    with pytest.raises(SimError, match=why):
        lazy.capture(lambda: queued(lazy))


def test_a_capture_that_forks_and_joins(lazy: SimDevice) -> None:
    graph = lazy.capture(lambda: forked(lazy, joins=True))
    with lazy.main.active():
        graph.replay()
    lazy.wait_idle()
    lazy.check()


def work_on(device: SimDevice, stream: Stream) -> torch.Tensor:
    """An operation on a stream."""
    with stream.active():
        return torch.zeros(3, device=device.torch_device)


def forked(device: SimDevice, joins: bool) -> None:
    """Work on a side stream that follows the main one, which waits for it only if told to."""
    fork, join = device.new_event(), device.new_event()
    fork.record(device.main)
    device.copies.wait_event(fork)
    work_on(device, device.copies)
    join.record(device.copies)
    if joins:
        device.main.wait_event(join)


def test_observers_see_an_operation_before_it_runs_and_behind() -> None:
    """Late, like the operation itself: what they compare is the device's truth, not the host's."""
    seen: list[Any] = []

    def observer(args: tuple[torch.Tensor, float, float]) -> Callable[[], None]:
        seen.append(args[0].tolist())
        return lambda: seen.append(args[0].tolist())

    with SimDevice(3, speeds=(0.0, 0.0), observers=[("cap_logits", observer)]) as device:
        x = torch.full((1, 2), 2.0, device=device.torch_device)
        cap_logits(x, 1.0, 1.0)
        assert not seen
        device.wait_idle()
    assert seen[0] == [[2.0, 2.0]] and seen[1] == [[pytest.approx(0.964, abs=1e-3)] * 2] and len(seen) == 2
