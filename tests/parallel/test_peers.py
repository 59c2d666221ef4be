"""Small sums go through peers' memory where all ranks have it, and by the transport everywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch

from headway.engine.world import World
from headway.kernels.collectives import all_reduce_
from headway.kernels.peer_reduce import CHUNK, FILL
from headway.kernels.rms_norm.reference import add_rms_norm
from headway.models.layers.forms import Out
from headway.models.layers.junction import ProjectOut, Stream
from headway.models.layers.linear import SummedLinear
from headway.models.layers.norm import LayerNorm, RMSNorm
from headway.parallel import peers as peers_module
from headway.parallel.group import RankError, RankGroup
from headway.parallel.mesh import Mesh
from headway.parallel.peer_buffers import Driver, NoPeerBuffersError, Offer, PeerBuffers, meet
from headway.parallel.peers import HOP_BYTES, Peers, buffer_bytes, find_peers
from headway.runner.runner import InFlight, ModelRunner
from tests.kernels.test_collectives import Echo

T = TypeVar("T")
CARDS = ["GPU-a", "GPU-b", "GPU-c"]
CPU = torch.device("cpu")
MOST = 64 * 1024


class Memory(Driver):
    """The host's memory as GPUs'; "handles" are addresses."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.held, self.opened = fails, dict[int, torch.Tensor](), list[int]()

    def allocate(self, size: int) -> int:
        self._may("allocate")
        buffer = torch.full((size // 2,), FILL, dtype=torch.int16)
        self.held[buffer.data_ptr()] = buffer
        return buffer.data_ptr()

    def free(self, address: int) -> None:
        del self.held[address]

    def handle(self, address: int) -> bytes:
        self._may("handle")
        return address.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        self._may("open")
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def reaches(self, own: int, other: int) -> bool:
        return self.fails != "reaches"

    def _may(self, what: str) -> None:
        if self.fails == what:
            raise OSError(f"it does not {what}")


def on_ranks(size: int, run: Callable[[int, Callable[[bytes], list[bytes]]], T]) -> list[T | BaseException]:
    """What ``run`` gives or raises on each rank, a thread; it is given a way to tell all others."""
    barrier, said = threading.Barrier(size, timeout=20), [b""] * size
    found: list[Any] = [None] * size

    def rank(number: int) -> None:
        def gather(words: bytes) -> list[bytes]:
            said[number] = words
            barrier.wait()
            heard = list(said)
            barrier.wait()
            return heard

        try:
            found[number] = run(number, gather)
        except BaseException as error:
            found[number] = error
            if not isinstance(error, NoPeerBuffersError):  # those are raised by all
                barrier.abort()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def buffers_of(size: int, drivers: list[Memory] | None = None) -> list[Any]:
    drivers = drivers or [Memory() for _ in range(size)]
    nbytes = buffer_bytes(size, MOST)
    return on_ranks(
        size, lambda rank, gather: meet(lambda: drivers[rank], CARDS, rank, rank, nbytes, gather)
    )  # fmt: skip


def peers_of(size: int) -> list[Peers]:
    return [Peers(buffers, rank, size, CPU, MOST) for rank, buffers in enumerate(buffers_of(size))]


# -- buffers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_all_know_all_rooms(size: int) -> None:
    drivers = [Memory() for _ in range(size)]
    found = buffers_of(size, drivers)
    own = [next(iter(each.held)) for each in drivers]
    assert [each.addresses for each in found] == [own] * size
    for each in found:
        each.close()
    assert not any(each.held or each.opened for each in drivers)


@pytest.mark.parametrize("fails", ["allocate", "handle", "open", "reaches"])
def test_one_that_cannot_keeps_all_from_it(fails: str) -> None:
    """All ranks say the same, name the rank, and give back what they had."""
    drivers = [Memory(), Memory(fails), Memory()]
    found = buffers_of(3, drivers)
    assert all(isinstance(each, NoPeerBuffersError) for each in found)
    assert len({str(each) for each in found}) == 1 and "rank 1" in str(found[0])
    assert not any(each.held or each.opened for each in drivers)


def test_ranks_without_a_driver_say_so() -> None:
    def no_driver() -> Driver:
        raise OSError("no such library")

    found = on_ranks(2, lambda rank, gather: meet(no_driver, CARDS, rank, rank, 100, gather))
    assert all("no such library" in str(each) for each in found)


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (Offer("elsewhere", "GPU-b"), "another host"),
        (Offer("here", "GPU-z"), "none that this process sees"),
        (Offer("here", "GPU-a"), "beside its own"),
    ],
)
def test_what_is_no_peer(offer: Offer, reason: str) -> None:
    buffers = PeerBuffers(Memory(), 100)
    with pytest.raises(OSError, match=reason):
        buffers.open([Offer("here", "GPU-a"), offer], 0, CARDS)


# -- sums --------------------------------------------------------------------------------------------------------------


def test_sums_take_the_way_of_their_size() -> None:
    """Both sides of the limit, and of the number of kinds of units."""
    peers = peers_of(2)[0]
    assert peers.sum(torch.ones(MOST // 4)) is not None and peers.sum(torch.ones(MOST // 4 + 1)) is None
    assert peers.sum(torch.ones(4, dtype=torch.int32)) is None and peers.sum(torch.ones(4, 4).t()) is None
    weight = torch.ones(640)

    def norm(width: int) -> object:
        x = torch.ones(2, width)
        return peers.sum_norm(x, x.clone(), weight, x.clone(), 0.0, 1.0)

    assert norm(640) is not None and norm(320) is not None
    assert norm(160) is None, "there is room for three kinds"
    assert norm(640) is not None
    parity = [each.parity for each in peers._regions.values() if each is not None]
    ends = [each.data_ptr() + each.nbytes for each in parity]
    assert all(end <= each.data_ptr() for end, each in zip(ends, parity[1:], strict=False)), (
        "each kind has its own parity"
    )
    starts = [(each.start, len(each.parity)) for each in peers._regions.values() if each is not None]
    assert starts[0][0] == 0 and len({start for start, _ in starts}) == 3 and min(units for _, units in starts) > 0


def test_padded_rows_fill_their_region_sooner() -> None:
    """A row of 65 takes the room of 128: half as many fit as their bytes would."""
    peers = peers_of(2)[0]
    weight = torch.ones(65)
    for rows, fits in ((128, True), (129, False)):
        x = torch.ones(rows, 65)
        assert x.nbytes < MOST
        assert (peers.sum_norm(x, x.clone(), weight, x.clone(), 0.0, 1.0) is not None) is fits


def test_a_second_hop_is_for_many_ranks() -> None:
    """Two ranks send as much either way; from four on the limit falls with their number."""
    some = torch.empty(HOP_BYTES, dtype=torch.int8, device="meta")
    for size, two in ((2, False), (3, False), (4, True), (8, True)):
        each = object.__new__(Peers)
        each.size = size
        assert each.two_shot(some) is two
        assert not each.two_shot(some[:: 2 * size])


@pytest.mark.parametrize("size", [2, 3])
def test_groups_add_up_through_memory(size: int) -> None:
    """What small sums give; of a large one, the transport's. Then with the norm, and again."""
    peers = peers_of(size)
    groups = [RankGroup(Echo(), rank, size) for rank in range(size)]
    for group, each in zip(groups, peers, strict=True):
        group.peers = each
    weight = torch.linspace(0.5, 1.5, 192)

    def run(rank: int, gather: object) -> None:
        group = groups[rank]
        for call in range(3):
            x = torch.full((CHUNK + 5,), rank + call + 1.0)
            assert torch.equal(group.all_reduce(x), torch.full_like(x, sum(n + call + 1.0 for n in range(size))))
            large = torch.ones(MOST // 4 + 1)
            assert torch.equal(group.all_reduce(large), torch.full_like(large, 2.0)), "the transport doubles"
            part, residual = torch.full((3, 192), rank + 1.0), torch.ones(3, 192)
            y = group.add_norm(part, residual, weight, 1e-6, 0.5)
            wanted = torch.ones(3, 192)
            normed = add_rms_norm(torch.full((3, 192), size * (size + 1) / 2), wanted, weight, 1e-6, 0.5)
            assert y is not None and torch.equal(residual, wanted) and torch.equal(y, normed)
            assert group.add_norm(torch.ones(1000, 192), torch.ones(1000, 192), weight, 1e-6, 1.0) is None

    assert on_ranks(size, run) == [None] * size
    for group in groups:
        group.close()
        assert group.peers is None


def test_waiting_ends_when_it_is_told_to() -> None:
    peers = peers_of(2)
    group = RankGroup(Echo(), 0, 2)
    group.peers = peers[0]
    timer = threading.Timer(0.05, group.stop)
    timer.start()
    group.all_reduce(torch.ones(5))
    timer.join()
    group.close()


class Recorder(Echo):
    """Two ranks that are alike; also through memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        self.kinds.append("transport")
        super().all_reduce(x)


@pytest.mark.parametrize("through_memory", [False, True])
@pytest.mark.parametrize("norm", ["rms", "layer", "none", "replaces"])
def test_the_sum_behind_a_product(through_memory: bool, norm: str) -> None:
    """The residual and its norm, in whatever form the product comes; other norms follow in kernels of their own."""
    transport = Recorder()
    group = RankGroup(transport, 0, 2)

    def fused(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float
    ) -> torch.Tensor | None:
        if not through_memory:
            return None
        transport.kinds.append("memory")
        return add_rms_norm(2 * x, residual, weight, eps, factor)

    linear = SummedLinear(
        8, {"out": 16}, group=group, columns=(0, 8, 16), bias=True, dtype=torch.float32, device=CPU
    )  # fmt: skip
    torch.nn.init.normal_(linear.weight)
    assert linear.bias is not None
    linear.bias.data.fill_(0.25)
    made: LayerNorm | RMSNorm | None = None
    if norm == "layer":
        made = LayerNorm(16, 1e-5, bias=False, dtype=torch.float32, device=CPU)
    elif norm != "none":
        made = RMSNorm(16, 1e-5, dtype=torch.float32, device=CPU)
    if made is not None:
        torch.nn.init.ones_(made.weight)
    out = ProjectOut(linear, made, None, 0.5, replaces=norm == "replaces")
    product = out.product()
    assert product is not None and not product.added and not product.behind, "a sum over ranks stands behind it"
    x, before = torch.randn(3, 8), torch.randn(3, 16)
    wanted = before + 0.5 * 2 * (x @ linear.weight.t() + 0.25)
    with patch.object(group, "add_norm", fused):
        for form in (Out.PLAIN, Out.SKINNY, Out.MID):
            transport.kinds.clear()
            stream = out(x, Stream(before.clone()), form)
            fuses = through_memory and norm == "rms"
            assert transport.kinds == (["memory"] if fuses else ["transport"])
            normed = wanted if made is None else made.forward(wanted)
            if norm == "replaces":
                assert torch.allclose(stream.residual, normed, atol=1e-5)
            else:
                assert torch.allclose(stream.residual, wanted, atol=1e-5)
            assert stream.normed is None or torch.allclose(stream.normed, normed, atol=1e-5)
    group.close()


def test_what_a_lost_rank_left_behind_is_thrown_away() -> None:
    """Kernels that gave up waiting have made nonsense, and their step arrives like any other."""

    class Lost:
        lost: str | None = None

        def check(self) -> None:
            if self.lost is not None:
                raise RankError(self.lost)

        def explain(self, error: RankError) -> RankError:
            return error

    class Arrived:
        def collect(self, running: object) -> str:
            return "tokens"

    runner = object.__new__(ModelRunner)
    runner.followers, runner.executor = Lost(), Arrived()  # type: ignore[assignment]
    step = InFlight(None, None)  # type: ignore[arg-type]
    assert runner.collect(step) == "tokens"  # type: ignore[comparison-overlap]
    Lost.lost = "rank 1 was killed"
    with pytest.raises(RankError, match="rank 1 was killed"):
        runner.collect(step)


def test_a_lost_world_ends_all_waiting() -> None:
    stopped: list[str] = []

    class Group:
        def stop(self) -> None:
            stopped.append("group")

    class Transport:
        def abort(self) -> None:
            stopped.append("transport")

    world = World(Mesh(2))
    world._groups.append(Group())  # type: ignore[arg-type]
    world._transports.append(Transport())  # type: ignore[arg-type]
    world.lose("rank 1 was killed")
    assert stopped == ["group", "transport"], "NCCL's abort may wait for what runs before it"


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["", "switch", "wrong", "buffers"])
def test_which_way_is_said_once(reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headway")
    drivers = [Memory("open" if reason == "buffers" else "") for _ in range(2)]
    taken = iter(drivers)
    lock = threading.Lock()

    def driver() -> Memory:
        with lock:
            return next(taken)

    monkeypatch.setenv("HEADWAY_PEER_REDUCE", "0" if reason == "switch" else "1")
    monkeypatch.setattr(peers_module, "Driver", driver)
    monkeypatch.setattr(peers_module, "cards_here", lambda: CARDS)
    monkeypatch.setattr(peers_module, "SMALL", MOST)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    tried = "rank 0: a sum through peers' memory was wrong" if reason == "wrong" else ""
    monkeypatch.setattr(Peers, "try_out", lambda self: "" if self.rank else tried)
    found = on_ranks(2, lambda rank, gather: find_peers(rank, 2, torch.device("cpu", rank), gather))
    assert not any(isinstance(each, BaseException) for each in found), found
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 1
    if reason:
        assert found == [None, None] and "NCCL alone" in said[0]
        assert not any(each.held or each.opened for each in drivers)
    else:
        assert all(isinstance(each, Peers) for each in found) and "peer memory" in said[0]


def test_the_trial_finds_wrong_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    class Passed:
        def record(self) -> None: ...

        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "Event", Passed)
    peers = peers_of(2)
    assert on_ranks(2, lambda rank, gather: peers[rank].try_out()) == ["", ""]
    monkeypatch.setattr(Peers, "sum", lambda self, x: lambda: all_reduce_)
    assert "wrong" in peers[0].try_out()


def test_the_trial_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def record(self) -> None: ...

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Never)
    monkeypatch.setattr(peers_module, "TRIAL_SECONDS", 0.0)
    peers = peers_of(2)[0]
    monkeypatch.setattr(Peers, "sum", lambda self, x: lambda: None)
    assert "did not end" in peers.try_out() and int(peers._stop[0]) == 1
