"""The collective operations: what each does by its group's transport, and that they are operations like any others."""

from __future__ import annotations

import pytest
import torch

from headway.device.sim import SimDevice
from headway.engine.world import World
from headway.kernels.registry import TRANSPORTS
from headway.parallel.group import Alone, RankGroup
from headway.parallel.mesh import Mesh
from tests.parallel.ranks import on_ranks


class Echo:
    """A transport of two ranks that are alike: the other one has the same tensors."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.posted: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        x *= 2

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x[None].expand_as(out))

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x[:1].expand_as(out))  # this is rank 0

    def send(self, x: torch.Tensor, peer: int) -> None:
        self.sent.append(x.clone())

    def receive(self, x: torch.Tensor, peer: int) -> None:
        x.copy_(self.sent.pop(0))

    def post(self, x: torch.Tensor, peer: int) -> None:
        self.posted.append(x)

    def finish(self) -> None:
        self.posted.pop(0).copy_(self.sent.pop(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 0)])
def test_each_operation(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    group = RankGroup(Echo(), 0, 2)
    x = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    assert torch.equal(group.all_reduce(x.clone()), 2 * x)
    assert torch.equal(group.all_gather(x), torch.stack([x, x]))
    assert torch.equal(group.all_to_all(torch.stack([x, x + 1])), torch.stack([x, x]))
    group.send(x, 1)
    assert torch.equal(group.receive(torch.empty_like(x), 1), x)
    late = torch.zeros_like(x)
    group.post(late, 1)
    group.send(x, 1)
    group.finish(late)
    assert torch.equal(late, x)
    group.close()
    assert group.number not in TRANSPORTS


def test_views_are_summed_too() -> None:
    group, x = RankGroup(Echo(), 0, 2), torch.arange(12.0).view(3, 4)
    assert torch.equal(group.all_reduce(x[:, 1:3]), 2 * torch.arange(12.0).view(3, 4)[:, 1:3])
    group.close()


def test_a_number_is_not_taken_from_a_later_group() -> None:
    first = RankGroup(Echo(), 0, 2)
    first.close()
    second = RankGroup(Echo(), 0, 2)
    assert second.number == first.number
    first.close()
    assert second.number in TRANSPORTS
    second.close()


def test_ranks_send_and_receive() -> None:
    def work(world: World) -> list[float]:
        group, peer = world.tensor, 1 - world.mesh.rank
        waiting = torch.zeros(2)
        group.post(waiting, peer)
        group.send(torch.full((2,), 1.0 + world.mesh.rank), peer)
        group.finish(waiting)
        return [float(value) for value in waiting]

    assert on_ranks(Mesh(2, 1), work) == [[2.0, 2.0], [1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_what_all_have_for_it(dtype: torch.dtype) -> None:
    def work(world: World) -> torch.Tensor:
        mine = 10.0 * world.mesh.rank + torch.arange(3.0)[:, None, None].expand(3, 2, 4)
        return world.tensor.all_to_all(mine.to(dtype))

    for rank, found in enumerate(on_ranks(Mesh(3, 1), work)):
        assert found[:, 0, 0].tolist() == [rank, 10.0 + rank, 20.0 + rank]


def test_alone() -> None:
    x = torch.ones(3)
    assert Alone().all_to_all(x[None]).shape == (1, 3)
    assert torch.equal(Alone().all_reduce(x), x)
    assert torch.equal(Alone().all_gather(x), x[None])


def test_the_simulated_device_runs_them_late() -> None:
    """They are queued like kernels: nothing is sent before the stream gets there."""
    echo = Echo()
    group = RankGroup(echo, 0, 2)
    with SimDevice(0, speeds=(0.0, 0.0)) as device:
        with device.main.active(), torch.inference_mode():
            x = torch.ones(4, device=device.torch_device)
            group.send(group.all_reduce(x), 1)
        assert not echo.sent
        device.wait_idle()
    assert torch.equal(echo.sent[0], torch.full((4,), 2.0))
    group.close()


def test_meta_gives_shapes() -> None:
    assert RankGroup(Echo(), 0, 4).all_gather(torch.empty(3, 5, device="meta")).shape == (4, 3, 5)
