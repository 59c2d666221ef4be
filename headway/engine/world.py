"""``World``: a rank's ties with those that run the same model together with it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.seat import Seat
from headway.device.base import Device
from headway.models.interface import ModelConfig
from headway.models.sharding import Sharing, first_blocks, sharded
from headway.parallel.group import Alone, Group, RankError, RankGroup, TorchTransport
from headway.parallel.keys import Keys, OwnKeys, wait_for
from headway.parallel.mesh import Mesh
from headway.parallel.peer_buffers import Gather
from headway.parallel.peers import find_peers
from headway.parallel.stage import Stage
from headway.parallel.turns import Turns

START_SECONDS: Final = 1800.0
"""How long ranks wait for each other while they load weights, compile and capture."""
FAILED: Final = "failed"
REASON_SECONDS: Final = 2.0
"""How long an error of a collective waits for whoever knows which rank is to blame."""


class Post(Protocol):
    """Takes messages to one follower. Never waits for it, as long as it is alive."""

    def send(self, kind: int, data: bytes) -> None: ...
    def close(self) -> None: ...


class World:
    """Ties with the ranks of one model.

    Args:
        seconds: after which a rank that waits for another in a step gives up, once it has ``started``.
        keys: where ranks leave word while they start; None: there is only one rank.

    Attributes:
        mesh: who this is.
        tensor: the ranks that share each layer with this one.
        stages, tokens: one rank of each stage.
        peers: replicas that share experts with this one.
        posts: the leader's, to all others.
        lost: why this world has come to an end; None while it has not.
    """

    def __init__(self, mesh: Mesh, keys: Keys | None = None, seconds: float = 60.0) -> None:
        self.mesh, self.keys, self.seconds = mesh, keys or OwnKeys(), seconds
        self.tensor: Group = Alone()
        self.stages: Group = Alone()
        self.tokens: Group = Alone()
        self.peers: Group = Alone()
        self.posts: list[Post] = []
        self.lost: str | None = None
        self._starts = True
        self._known = threading.Event()
        self._transports: list[TorchTransport] = []
        self._groups: list[RankGroup] = []
        self._numbers = {who: itertools.count() for who in ("all", "leaders")}

    @property
    def is_alone(self) -> bool:
        return self.mesh.size == self.mesh.replicas == 1

    # -- the start -------------------------------------------------------------------------------------------------

    def connect(self, device: torch.device) -> None:
        """Meet the other ranks: all must come."""
        self.least(0)
        mesh, own = self.mesh, f"{self.mesh.replica}-"
        cpu = torch.device("cpu") if device.type == "meta" else device
        if mesh.tensor > 1:
            place = f"tensor{own}{mesh.stage}", mesh.tensor_rank, mesh.tensor
            self.tensor = self._group_in_reach(*place, device, cpu)
        if mesh.pipeline > 1:
            self.stages = self._group(f"stages{own}{mesh.tensor_rank}", mesh.stage, mesh.pipeline, cpu)
            self.tokens = self._group(f"tokens{own}{mesh.tensor_rank}", mesh.stage, mesh.pipeline, cpu)
        if mesh.replicas > 1:
            self.peers = self._group_in_reach(f"peers{mesh.rank}", mesh.replica, mesh.replicas, device, cpu)

    def _group_in_reach(self, name: str, rank: int, size: int, device: torch.device, cpu: torch.device) -> RankGroup:
        """One whose small exchanges go through its GPUs' memory, where they reach it."""
        group = self._group(name, rank, size, cpu)
        if device.type == "cuda":
            group.peers = find_peers(rank, size, device, self._gather(name, rank, size))
        return group

    def _group(self, name: str, rank: int, size: int, device: torch.device) -> RankGroup:
        from headway.parallel.rank_store import RankStore  # late: see there

        store = RankStore(self.keys, START_SECONDS, self.check)
        transport = TorchTransport(store, rank, size, device, START_SECONDS, name, self.mesh.name)
        self._transports.append(transport)
        self._groups.append(RankGroup(transport, rank, size))
        return self._groups[-1]

    def _gather(self, name: str, rank: int, size: int) -> Gather:
        """What each rank of a group says, by rank, once all have; at the start only."""
        numbers = itertools.count()

        def gather(said: bytes) -> list[bytes]:
            place = f"{name}-says{next(numbers)}/"
            self.keys.set(f"{place}{rank}", said)
            return [wait_for(self.keys, f"{place}{n}", START_SECONDS, self.check) for n in range(size)]

        return gather

    def sharded(self, config: ModelConfig, *, whole_experts: bool = False, embeds: bool = False) -> ModelConfig:
        """The model as this rank has it; ``embeds``: see ``Stage``."""
        blocks = len(getattr(config, "blocks", ()))
        borders = [*first_blocks(config, self.mesh.pipeline), blocks] if blocks else [0] * (self.mesh.pipeline + 1)
        stage = Stage(self.stages, self.tokens, range(*borders[self.mesh.stage :][:2]), embeds)
        return sharded(config, Sharing(self.tensor, stage, self.peers, whole_experts))

    def turns(self, device: Device) -> Turns | None:
        """For halves of steps whose exchanges overlap; None: there is nothing to overlap. Of stages each has its halves one
        after the other: what is handed on waits for the whole step. Not on a CPU, which computes while it exchanges nothing."""
        shared = [each for each in (self.tensor, self.peers) if isinstance(each, RankGroup)]
        if not shared or self.mesh.pipeline > 1 or not device.asynchronous:
            return None
        turns = shared[0].turns or Turns(device)
        for group in shared:
            group.turns = turns
        return turns

    def least(self, value: int) -> int:
        """The least of what all ranks give, of all replicas that share experts; blocks until all have. At the start only."""
        size = self.mesh.size
        return self._least("all", value, self.mesh.replica * size + self.mesh.rank, size * self.mesh.replicas)

    def least_of_leaders(self, value: int) -> int:
        """The same, among the leaders of the replicas."""
        return self._least("leaders", value, self.mesh.replica, self.mesh.replicas)

    def _least(self, who: str, value: int, place: int, places: int) -> int:
        if places == 1:
            return value
        name = f"least-{who}{next(self._numbers[who])}/"
        self.keys.set(f"{name}{place}", str(value).encode())
        return min(int(wait_for(self.keys, f"{name}{n}", START_SECONDS, self.check)) for n in range(places))

    def started(self) -> None:
        """All that takes long is done: from now on a rank is waited for no longer than ``seconds``. Before, one may compile
        while another waits in the middle of a rehearsed step, stages above all, which begin one after the other."""
        self._starts = False
        for transport in self._transports:
            transport.limit(self.seconds)

    # -- steps -----------------------------------------------------------------------------------------------------

    def send(self, kind: int, data: bytes) -> None:
        """The leader: tell all others. Does not wait for them."""
        for post in self.posts:
            post.send(kind, data)

    def lose(self, reason: str) -> None:
        """It has come to an end; the first reason stays. Any thread may say so."""
        if self.lost is None:
            self.lost = reason
        self._known.set()
        for group in self._groups:
            group.stop()
        for transport in self._transports:
            transport.abort()

    def check(self) -> None:
        """Raises RankError when this world has come to an end, or while it starts another replica's has."""
        if self.lost is None and self._starts and self.mesh.replicas > 1:
            failed = self.keys.get(FAILED)
            self.lost = None if failed is None else failed.decode()
        if self.lost is not None:
            raise RankError(self.lost)

    def explain(self, error: RankError) -> RankError:
        """``error`` of a collective, or what the watch has found out meanwhile, which names the rank. Either is the end."""
        if not self.is_alone:
            self._known.wait(REASON_SECONDS)
            self.lose(str(error))
        return error if self.lost is None else RankError(self.lost)

    def fail(self, error: BaseException) -> None:
        """This replica will not start: tell the others, which wait for it."""
        if self._starts and self.mesh.replicas > 1:
            self.keys.set(FAILED, f"{self.mesh.name} did not start: {type(error).__name__}: {error}".encode())

    def hang_up(self) -> None:
        """Break off, so that ranks which wait for this one, a thread, need not wait for the time-out."""
        for transport in self._transports:
            transport.hang_up()

    def close(self) -> None:
        """This rank leaves."""
        for group in self._groups:
            group.close()


def mesh_of(args: EngineArgs, seat: Seat | None) -> Mesh:
    """The place of the rank that leads."""
    replica, replicas = (0, 1) if seat is None else (seat.rank, seat.size)
    return Mesh(args.tensor_parallel_size, args.pipeline_parallel_size, replica=replica, replicas=replicas)


def device_of(args: EngineArgs, rank: int) -> str:
    """The device of a rank: GPUs in order, from the one that ``args.device`` names on."""
    kind, _, number = args.device.partition(":")
    per_host = args.num_ranks // args.nnodes
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return "cpu"
    if args.distributed_executor_backend == "ray" and rank:
        return "cuda:0"  # the only one that Ray lets a follower see
    if kind == "sim":
        return f"sim:{int(number or 0) + rank}"
    return f"cuda:{int(number or 0) + rank % per_host}"


def check_devices(args: EngineArgs) -> None:
    """Raises ConfigError when this host has fewer GPUs than ranks."""
    first = device_of(args, 0)
    if not first.startswith("cuda"):
        return
    have, per_host = torch.cuda.device_count(), args.num_ranks // args.nnodes
    need = int(first.partition(":")[2]) + per_host
    if need > have:
        raise ConfigError(
            f"tensor_parallel_size={args.tensor_parallel_size} times pipeline_parallel_size={args.pipeline_parallel_size} need "
            f"{per_host} GPUs on this host from {first} on, and there are {have}; lower them"
        )


def watch_parent(ended: Callable[[], object]) -> None:
    """Calls ``ended`` when the process that began this one has gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        ended()

    threading.Thread(target=watch, name="headway-parent", daemon=True).start()
