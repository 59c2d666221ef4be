"""``Group``: ranks that compute together. Its operations are ``headway.kernels.collectives``, by gloo or NCCL."""

from __future__ import annotations

import datetime
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from headway.device.base import DeviceError
from headway.kernels.collectives import all_gather_, all_reduce_, all_to_all_, finish_, post_, receive_, send_to
from headway.kernels.registry import TRANSPORTS, Transport
from headway.parallel.peers import Peers
from headway.parallel.turns import Turns


class RankError(DeviceError):
    """Ranks can no longer work together: one has gone, hangs, or another came in its place."""


class Group(Protocol):
    """Ranks that compute together, as one of them sees it.

    Attributes:
        size, rank: how many, and which one this is.
    """

    size: int
    rank: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, in its place."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float
    ) -> torch.Tensor | None:
        """residual += factor * the sum of x over all ranks, [T, C] all; the RMS norm of the residual. In one kernel; None:
        there is none for this x, and nothing was done."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: x of every rank."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """x [size, ...] -> [size, ...]: what each rank has in its x at the place of this one."""

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [size, ...] -> [...]: the sum, in float32 and by rank, of what all ranks have at the place of this one."""

    def send(self, x: torch.Tensor, peer: int) -> None:
        """To one rank, which receives it."""

    def receive(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """From one rank, in the place of x."""

    def post(self, x: torch.Tensor, peer: int) -> None:
        """As ``receive``, but x may be used only when ``finish`` was called for it; in the order of the posts."""

    def finish(self, x: torch.Tensor) -> None:
        """Wait, on the device, for what was posted first."""


class Alone:
    """A group of one."""

    size, rank = 1, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float
    ) -> torch.Tensor | None:
        return None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x[0]

    def send(self, x: torch.Tensor, peer: int) -> None:
        raise AssertionError("there is nobody to send to")

    def receive(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        raise AssertionError("there is nobody to receive from")

    def post(self, x: torch.Tensor, peer: int) -> None:
        raise AssertionError("there is nobody to receive from")

    def finish(self, x: torch.Tensor) -> None:
        raise AssertionError("there is nobody to receive from")


class RankGroup:
    """A group whose operations a transport carries.

    Attributes:
        number: of the transport in ``TRANSPORTS``.
        turns: halves of a step exchange through it; None: there are none.
        peers: small sums go through it; None: all are the transport's.
    """

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._transport, self.number = transport, _add(transport)
        self.turns: Turns | None = None
        self.peers: Peers | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        small = None if self.peers is None else self.peers.sum(x)
        self._exchange(small or partial(all_reduce_, x, self.number))
        return x

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float
    ) -> torch.Tensor | None:
        if self.peers is None:
            return None
        out = torch.empty_like(x)
        small = self.peers.sum_norm(x, residual, weight, out, eps, factor)
        if small is None:
            return None
        self._exchange(small)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x, out = x.contiguous(), x.new_empty((self.size, *x.shape))
        small = None if self.peers is None else self.peers.gather(x, out)
        self._exchange(small or partial(all_gather_, x, out, self.number))
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._exchange(partial(all_to_all_, x, out, self.number))
        return out

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x[0])
        small = None if self.peers is None else self.peers.scatter_sum(x, out)
        if small is None:
            return self.all_to_all(x).sum(0, dtype=torch.float32).to(x.dtype)
        self._exchange(small)
        return out

    def _exchange(self, collective: Callable[[], object]) -> None:
        if self.turns is None:
            collective()
        else:
            self.turns.exchange(collective)

    def send(self, x: torch.Tensor, peer: int) -> None:
        send_to(x, self.number, peer)

    def receive(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        receive_(x, self.number, peer)
        return x

    def post(self, x: torch.Tensor, peer: int) -> None:
        post_(x, self.number, peer)

    def finish(self, x: torch.Tensor) -> None:
        finish_(x, self.number)

    def stop(self) -> None:
        """Kernels of ours that wait for another rank give up. Any thread may say so."""
        if self.peers is not None:
            self.peers.stop()

    def close(self) -> None:
        """Nothing is sent any more."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
        if TRANSPORTS.get(self.number) is self._transport:  # else the number is another group's by now
            del TRANSPORTS[self.number]


def _add(transport: Transport) -> int:
    return next(each for each in itertools.count() if TRANSPORTS.setdefault(each, transport) is transport)


class TorchTransport:
    """One of torch's process groups.

    Args:
        store: where the ranks find each other.
        seconds: after which a rank that waits for another gives up; ``limit`` changes it.
        name: of the group; the same on all its ranks.
        mine: this rank, for errors.
    """

    def __init__(
        self, store: object, rank: int, size: int, device: torch.device, seconds: float, name: str, mine: str
    ) -> None:
        from torch import distributed  # late: there are builds without it

        dist: Any = distributed
        self._group: Any
        self._what = f"{mine}, group {name}"
        self._limit = limit = datetime.timedelta(seconds=seconds)
        self._store = store  # torch's threads ask it for as long as the group lives
        named = dist.PrefixStore(name, store)
        self._nccl = device.type == "cuda"
        self._posted: deque[Work] = deque()
        try:
            if self._nccl:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit  # noqa: SLF001 - torch offers no other way
                self._group = dist.ProcessGroupNCCL(named, rank, size, options)
                self._group.eager_connect_single_device(device)
            else:
                self._group = dist.ProcessGroupGloo(named, rank, size, limit)
        except RuntimeError as error:
            raise RankError(f"{self._what}: the ranks did not find each other: {error}") from error

    def limit(self, seconds: float) -> None:
        """From now on a rank that waits for another gives up after so many seconds."""
        self._limit = datetime.timedelta(seconds=seconds)
        self._group._set_default_timeout(self._limit)  # noqa: SLF001 - as above

    def all_reduce(self, x: torch.Tensor) -> None:
        self._do(lambda: self._group.allreduce([x]))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._nccl:
            self._do(lambda: self._group._allgather_base(out, x))  # noqa: SLF001 - as above
        else:
            self._do(lambda: self._group.allgather([list(out.unbind(0))], [x]))

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._do(lambda: self._group.alltoall_base(out, x, [], []))

    def send(self, x: torch.Tensor, peer: int) -> None:
        self._do(lambda: self._group.send([x], peer, 0))

    def receive(self, x: torch.Tensor, peer: int) -> None:
        self._do(lambda: self._group.recv([x], peer, 0))

    def post(self, x: torch.Tensor, peer: int) -> None:
        try:
            self._posted.append(self._group.recv([x], peer, 0))
        except RuntimeError as error:
            raise self._failure(error) from error

    def finish(self) -> None:
        self._do(self._posted.popleft)

    def _do(self, begin: Begin) -> None:
        """On CUDA ``wait`` makes the stream wait, not the host, unless it is given a time; gloo's messages from rank to rank
        know no other."""
        try:
            work = begin()
            work.wait() if self._nccl else work.wait(self._limit)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> RankError:
        return RankError(f"{self._what}: another rank has gone or does not answer: {error}")

    def hang_up(self) -> None:
        """Close the connections, as the end of a process would. By the thread that uses them."""
        del self._group

    def abort(self) -> None:
        """Let those that wait give up, as far as the library can."""
        if self._nccl:
            self._group.abort()


class Work(Protocol):
    """What torch gives for a collective that has begun."""

    def wait(self, timeout: datetime.timedelta = ..., /) -> object: ...


class Begin(Protocol):
    """Begins a collective."""

    def __call__(self) -> Work: ...
