"""Groups gather, and scatter their sums, through peers' memory up to its limits, and by the transport beyond them."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.peer_reduce import CHUNK
from headway.parallel.group import RankGroup
from tests.kernels.test_collectives import Echo
from tests.parallel.test_peers import MOST, on_ranks, peers_of

pytestmark = pytest.mark.timeout(120)
"""A rank that takes itself for another waits without end."""


class Exchanges(Echo):
    """A transport that says which of its operations ran; the ranks' values are not alike, so nothing is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.ran.append("all_gather")
        super().all_gather(x, out)

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.ran.append("all_to_all")
        super().all_to_all(x, out)


def groups_of(size: int) -> list[tuple[RankGroup, Exchanges]]:
    """Ranks that see each other's memory."""
    made = []
    for rank, peers in enumerate(peers_of(size)):
        transport = Exchanges()
        group = RankGroup(transport, rank, size)
        group.peers = peers
        made.append((group, transport))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [2, 3])
def test_groups_gather_through_memory(size: int, dtype: torch.dtype) -> None:
    """Every rank's own values by rank, of any shape, up to the limit; one element more goes by the transport."""
    groups = groups_of(size)
    most = MOST // dtype.itemsize

    def own(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.arange(torch.Size(shape).numel()).view(shape) % 251 + 7 * rank + 1).to(dtype)

    def run(rank: int, gather: object) -> None:
        group, transport = groups[rank]
        for shape in ((1,), (3, 5), (CHUNK + 1,), (most,)):
            wanted = torch.stack([own(each, shape) for each in range(size)])
            assert torch.equal(group.all_gather(own(rank, shape)), wanted), shape
        turned = own(rank, (5, 3)).t()
        assert torch.equal(group.all_gather(turned), torch.stack([own(each, (5, 3)).t() for each in range(size)]))
        assert transport.ran == []
        large = own(rank, (most + 1,))
        assert torch.equal(group.all_gather(large), torch.stack([large] * size)) and transport.ran == ["all_gather"]

    assert on_ranks(size, run) == [None] * size
    for group, _ in groups:
        group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_groups_scatter_their_sums_through_memory(size: int, dtype: torch.dtype) -> None:
    """Each rank's own part, added up in float32 by rank and rounded once; the limit is that of a part, not of all."""
    groups = groups_of(size)
    most = MOST // dtype.itemsize

    def own(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn((size, *shape), generator=torch.Generator().manual_seed(rank)).to(dtype)

    def run(rank: int, gather: object) -> None:
        group, transport = groups[rank]
        for shape in ((1,), (3, 5), (CHUNK + 1,), (most,)):
            wanted = torch.zeros(shape)
            for each in range(size):
                wanted += own(each, shape)[rank].float()
            assert torch.equal(group.scatter_sum(own(rank, shape)), wanted.to(dtype)), shape
        assert transport.ran == []
        group.scatter_sum(own(rank, (most + 1,)))
        assert transport.ran == ["all_to_all"]

    assert on_ranks(size, run) == [None] * size
    for group, _ in groups:
        group.close()


def test_whole_numbers_are_not_scattered_through_memory() -> None:
    """They are gathered there, but added up only by the transport's way."""
    peers = peers_of(2)[0]
    x = torch.ones(2, 4, dtype=torch.int32)
    assert peers.gather(x, x.new_empty(2, 2, 4)) is not None
    assert peers.scatter_sum(x, x.new_empty(4)) is None and peers.sum(x) is None
    assert peers.gather(x, x.new_empty(4, 2, 2).permute(2, 1, 0)) is None, "parts of the output lie apart"


def test_scattered_sums_by_the_transport_are_made_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256: of a half and ones of three ranks nothing would be left."""

    class Parts(Echo):
        def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(torch.tensor([256.0, 1.0, 1.0])[:, None].expand_as(out))

    group = RankGroup(Parts(), 1, 3)
    found = group.scatter_sum(torch.zeros(3, 4, dtype=torch.bfloat16))
    assert found.dtype is torch.bfloat16 and found.tolist() == [258.0] * 4
    group.close()
