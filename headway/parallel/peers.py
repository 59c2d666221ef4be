"""``Peers``: what ranks exchange of small tensors through peer memory (``kernels.peer_reduce``, ``peer_exchange``), in place of
NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch

from headway.core.log import logger
from headway.core.switches import PEER_REDUCE, is_on
from headway.kernels.peer_exchange import peer_gather_, peer_scatter_sum_
from headway.kernels.peer_reduce import CHUNK, peer_reduce_, peer_reduce_norm_, region_bytes
from headway.parallel.peer_buffers import Driver, Gather, NoPeerBuffersError, PeerBuffers, cards_here, meet

SMALL: Final = 4 * 2**20
"""Bytes up to which an exchange goes through peers' memory. On two H100s sums are faster than NCCL's up to 8 MiB, twice as
fast at 4; gathers and scattered sums were not measured by size."""
HOP_BYTES: Final = 768 * 2**10
"""What a GPU sends in the time that one message takes: a second hop pays when it saves more. Not measured yet."""
REGIONS: Final = 3
"""Kinds of units there is room for: rows of a model, pieces, and pieces in float32 or int32."""
MOST_COLUMNS: Final = 16384
"""Elements of a row that a program holds."""
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
SENT: Final = (*FLOATS, torch.int32)
"""What ``gather`` takes."""
TRIAL_SECONDS: Final = 30.0
"""How long the first sum may take, compilation on all ranks included."""

Exchange = Callable[[], object]
"""Queues it on the current stream."""


class Region(NamedTuple):
    """See ``kernels.peer_reduce``; ``parity`` int32 [U]."""

    start: int
    parity: torch.Tensor


class Peers:
    """Exchanges of ``size`` ranks, as ``rank`` of them sees them. All ranks ask for the same ones in the same order: each
    lays out its regions as it meets their kinds, and so all have them at the same places.

    Args:
        buffers: ``buffer_bytes`` each.
        most: bytes of the largest exchange.
    """

    def __init__(self, buffers: PeerBuffers, rank: int, size: int, device: torch.device, most: int) -> None:
        self.rank, self.size, self._held, self._most = rank, size, buffers, most
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        addresses = [*buffers.addresses, self._stop.data_ptr()]
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        # One int32 for each unit there can be; cut here, since a capture must not record that it is made.
        self._parity = torch.zeros(REGIONS * most // 128, dtype=torch.int32, device=device)
        self._regions: dict[tuple[int, int], Region | None] = {}
        self._bytes = self._units = 0

    def sum(self, x: torch.Tensor) -> Exchange | None:
        """What makes x the sum of x over the ranks; None: it is not for this way."""
        region = self._region(x, CHUNK) if x.dtype in FLOATS else None
        if region is None:
            return None
        return partial(
            peer_reduce_, x, region.parity, self._buffers, self.rank, self.size, region.start, self.two_shot(x)
        )

    def sum_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        factor: float,
    ) -> Exchange | None:
        """What adds factor times the sum of x [T, C] to the residual, and puts the norm of that into out; None: as above."""
        rows = residual.is_contiguous() and residual.dtype == x.dtype and x.shape[1] <= MOST_COLUMNS
        region = self._region(x, x.shape[1]) if rows else None
        if region is None:
            return None
        return partial(
            peer_reduce_norm_, x, residual, weight, out, region.parity, self._buffers, self.rank, self.size, region.start,
            self.two_shot(x), eps, factor,
        )  # fmt: skip

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> Exchange | None:
        """What makes out [size, *x.shape] x of every rank; None: as above."""
        region = self._region(x, CHUNK)
        if region is None or not out.is_contiguous():
            return None
        return partial(peer_gather_, x, out, region.parity, self._buffers, self.rank, self.size, region.start)

    def scatter_sum(self, x: torch.Tensor, out: torch.Tensor) -> Exchange | None:
        """What makes out [...] the sum of x[rank] of all ranks' x [size, ...]; None: as above."""
        region = self._region(out, CHUNK)
        if region is None or x.dtype not in FLOATS or not x.is_contiguous():
            return None
        return partial(peer_scatter_sum_, x, out, region.parity, self._buffers, self.rank, self.size, region.start)

    def two_shot(self, x: torch.Tensor) -> bool:
        """In one shot a rank sends size - 1 times x, in two 2 (size - 1) / size times, and waits twice."""
        saved = x.nbytes * (self.size - 1) * (self.size - 2) // self.size
        return saved > HOP_BYTES

    def _region(self, x: torch.Tensor, elements: int) -> Region | None:
        """For the units of x; None: x is none of ours, or too large."""
        if x.dtype not in SENT or x.nbytes > self._most or not x.is_contiguous():
            return None
        key = elements, x.itemsize
        if key not in self._regions:
            self._regions[key] = self._laid_out(*key)
        region = self._regions[key]
        return None if region is None or x.numel() > elements * len(region.parity) else region

    def _laid_out(self, elements: int, itemsize: int) -> Region | None:
        whole = buffer_bytes(self.size, self._most)
        each = region_bytes(1, elements, itemsize, self.size)
        units = min(whole // REGIONS // each, len(self._parity) // REGIONS)
        if len(self._regions) == REGIONS or not units:
            return None
        region = Region(self._bytes, self._parity[self._units : self._units + units])
        self._bytes, self._units = self._bytes + units * each, self._units + units
        return region

    def try_out(self) -> str:
        """Add up something; what went wrong, if anything. At the start: it blocks."""
        x = torch.full((CHUNK + 8,), 1.0, dtype=torch.bfloat16, device=self._buffers.device)
        wanted = float(self.size**4)
        for _ in range(4):  # each half twice
            exchange = self.sum(x)
            assert exchange is not None
            exchange()
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + TRIAL_SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                self.stop()
                return f"rank {self.rank}: a sum through peers' memory did not end"
            time.sleep(0.001)
        right = bool((x == wanted).all())  # host: at the start, to know whether the link works
        return "" if right else f"rank {self.rank}: a sum through peers' memory was wrong"

    def stop(self) -> None:
        """Kernels that wait for another rank give up; what they make is worthless. Any thread may say so."""
        self._stop[0] = 1

    def close(self) -> None:
        """Nothing is added up any more."""
        self._held.close()


def buffer_bytes(size: int, most: int) -> int:
    """Of each rank's buffer."""
    return REGIONS * region_bytes(most // 128, 64, 2, size)


def find_peers(rank: int, size: int, device: torch.device, gather: Gather) -> Peers | None:
    """The way through memory, if all ranks of a group have it; says which way sums go. All ranks call it at the start.

    Args:
        device: of this rank.
    """
    peers: Peers | None = None
    try:
        if any(each != b"on" for each in gather(b"on" if is_on(PEER_REDUCE) else b"off")):
            raise NoPeerBuffersError(f"{PEER_REDUCE} is 0")
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # so that the driver has a context
            buffers = meet(Driver, cards_here(), device.index or 0, rank, buffer_bytes(size, SMALL), gather)
            peers = Peers(buffers, rank, size, device, SMALL)
            failures = [each.decode() for each in gather(peers.try_out().encode()) if each]
        if failures:
            peers.close()
            raise NoPeerBuffersError(failures[0])
    except NoPeerBuffersError as reason:
        if not rank:
            logger.warning("exchanges of %d ranks use NCCL alone: %s", size, reason)
        return None
    if not rank:
        logger.info("exchanges of up to %d KiB of %d ranks use peer memory, larger ones NCCL", SMALL >> 10, size)
    return peers
