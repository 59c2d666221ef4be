"""The leader's side: starts followers, takes in those of other hosts, watches them all, and ends with the first that ends."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import torch

from headway.core.config import EngineArgs, Thresholds
from headway.core.log import logger, shown_format
from headway.core.seat import Seat
from headway.device.select import select_device
from headway.engine import rank_messages
from headway.engine.follower import serve
from headway.engine.world import START_SECONDS, Post, World, check_devices, device_of, mesh_of
from headway.parallel.group import RankError
from headway.parallel.keys import ADD, GET, SET, FileKeys, Keys, OwnKeys
from headway.parallel.mesh import Mesh
from headway.parallel.ring import Ring, ring_memory
from headway.parallel.wire import Link, answer, welcome
from headway.runner.followers import STOP

if TYPE_CHECKING:
    from headway.engine.ray_ranks import Placement

RING_BYTES: Final = 32 * 2**20
EXIT_SECONDS: Final = 10.0
"""How long a follower may take to leave before it is killed."""
WATCH_SECONDS: Final = 0.5


@contextmanager
def lead(
    args: EngineArgs,
    device: torch.device,
    thresholds: Thresholds,
    seat: Seat | None = None,
    placement: Placement | None = None,
) -> Iterator[World]:
    """The world of rank 0, in which all other ranks have come to be; they leave at the end.

    Args:
        seat: of this replica, where several share experts.
        placement: where Ray has room for the others.

    Raises:
        ConfigError: there are not enough GPUs, or no secret for several hosts.
        RankError: a rank did not come.
    """
    mesh, own = mesh_of(args, seat), OwnKeys()
    keys = own if seat is None else FileKeys(seat.folder)
    world = World(mesh, keys, float(args.distributed_timeout_seconds))
    with ExitStack() as stack:
        stack.callback(world.close)
        if args.num_ranks == 1:
            pass
        elif args.distributed_executor_backend == "threads":
            stack.enter_context(_threads(args, world, keys, thresholds))
        else:
            if placement is None:
                check_devices(args)
            stack.enter_context(_processes(args, world, own, seat, placement))
        try:
            world.connect(device)
            yield world
        except RankError as error:
            world.fail(error)
            raise world.explain(error) from error
        except BaseException as error:
            world.fail(error)
            raise


# -- ranks that are threads ----------------------------------------------------------------------------------------------


class ThreadPost:
    """Messages to a follower that is a thread of this process."""

    def __init__(self) -> None:
        # No SimpleQueue: once its time is up between two looks at its lock, CPython's C code waits with no limit at all.
        self._queue: queue.Queue[tuple[int, bytes]] = queue.Queue()

    def send(self, kind: int, data: bytes) -> None:
        """See ``Post``."""
        self._queue.put((kind, data))

    def receive(self, seconds: float) -> tuple[int, bytes] | None:
        """See ``Inbox``."""
        with contextlib.suppress(queue.Empty):
            return self._queue.get(timeout=seconds)
        return None

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def _threads(args: EngineArgs, world: World, keys: Keys, thresholds: Thresholds) -> Iterator[None]:
    """Followers as threads: for CPUs and the simulated device, which needs to see all ranks at once."""

    def run(mesh: Mesh, post: ThreadPost) -> None:
        own = World(mesh, keys, world.seconds)
        try:
            with contextlib.closing(select_device(device_of(args, mesh.rank))) as device:
                serve(args, own, post, device, thresholds)
        except BaseException as error:
            world.lose(f"{mesh.name}: {type(error).__name__}: {error}")
            own.hang_up()

    threads = []
    for rank in range(1, world.mesh.size):
        post = ThreadPost()
        world.posts.append(post)
        name = f"headway-rank-{rank}"
        threads.append(threading.Thread(target=run, args=(world.mesh.at(rank), post), name=name, daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        for each in world.posts:
            each.send(STOP, b"")
        for thread in threads:
            thread.join(EXIT_SECONDS)


# -- ranks that are processes --------------------------------------------------------------------------------------------


class _Follower:
    """What the leader knows of one follower.

    Attributes:
        heard: when it last said anything (``monotonic``).
        child: its process; None: it is another host's.
    """

    def __init__(self, mesh: Mesh, link: Link, post: Post, child: subprocess.Popen[bytes] | None) -> None:
        self.mesh, self.link, self.post, self.child = mesh, link, post, child
        self.heard = time.monotonic()

    @property
    def name(self) -> str:
        return self.mesh.name if self.child is None else f"{self.mesh.name}, process {self.child.pid},"

    def end(self) -> str:
        """How its process ended."""
        if self.child is None:
            return "has closed its connection"
        try:
            code = self.child.wait(WATCH_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


class _Watch:
    """Listens to all followers; the first that fails, ends or falls silent ends the world."""

    def __init__(self, world: World, keys: OwnKeys, followers: list[_Follower]) -> None:
        self._world, self._keys, self._followers = world, keys, followers
        self._ended = threading.Event()
        for each in followers:
            threading.Thread(target=self._listen, args=(each,), name="headway-rank-link", daemon=True).start()
        threading.Thread(target=self._count, name="headway-rank-watch", daemon=True).start()

    def _listen(self, follower: _Follower) -> None:
        while not self._ended.is_set():
            try:
                message = follower.link.receive()
            except RankError:
                self._lose(f"{follower.name} {follower.end()}")
                return
            if message is None:
                continue
            follower.heard = time.monotonic()
            kind, data = message
            if kind == rank_messages.BEAT:
                with contextlib.suppress(RankError):  # if it has gone, the next look tells
                    follower.link.send(rank_messages.BEAT, seconds=WATCH_SECONDS)
            elif kind == rank_messages.FAILED:
                self._lose(f"{follower.name} failed: {data.decode(errors='replace')}")
                return
            elif kind in (SET, GET, ADD):
                with contextlib.suppress(RankError):
                    self._keys.serve(follower.link, kind, data)

    def _count(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            for each in self._followers:
                silent = time.monotonic() - each.heard
                if silent > self._world.seconds:
                    self._lose(f"{each.name} has not been heard of for {silent:.0f} s")
                    return

    def _lose(self, reason: str) -> None:
        if not self._ended.is_set():
            logger.error("%s", reason)
            self._world.lose(reason)

    def end(self) -> None:
        """What followers do from now on is no failure."""
        self._ended.set()


@contextmanager
def _processes(
    args: EngineArgs, world: World, keys: OwnKeys, seat: Seat | None, placement: Placement | None
) -> Iterator[None]:
    """Followers as processes: of this host, begun here, and of others, which come by themselves or are begun by Ray."""
    per_host = 1 if placement is not None else world.mesh.size // args.nnodes
    followers: list[_Follower] = []
    watch = None
    try:
        for rank in range(1, per_host):
            followers.append(_begin(world.mesh.at(rank)))
        if per_host < world.mesh.size:
            followers += _take_in(args, world.mesh, range(per_host, world.mesh.size), placement)
        level = logger.getEffectiveLevel() if logger.hasHandlers() else None
        for each in followers:
            boot = rank_messages.Boot(args, each.mesh.rank, level, shown_format(), seat)
            each.link.send(rank_messages.BOOT, rank_messages.encode(boot), seconds=world.seconds)
            each.heard = time.monotonic() + START_SECONDS  # until its first sign of life: importing torch takes a while
        watch = _Watch(world, keys, followers)
        world.posts += [each.post for each in followers]
        yield
    finally:
        if watch is not None:
            watch.end()
        _leave(world, followers)


def _begin(mesh: Mesh) -> _Follower:
    """A follower's process on this host. It inherits its two sockets and the ring, which nobody else can open."""
    (control, theirs), (bell, their_bell), memory = socket.socketpair(), socket.socketpair(), ring_memory(RING_BYTES)
    given = [theirs.fileno(), their_bell.fileno(), memory]
    try:
        command = [sys.executable, "-P", "-m", "headway.engine.follower", *map(str, given)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path}
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, pass_fds=given)
        ring = Ring(memory, bell, mesh.name)
    finally:
        theirs.close()
        their_bell.close()
        os.close(memory)
    return _Follower(mesh, Link(control, mesh.name), ring, child)


def _take_in(args: EngineArgs, mesh: Mesh, ranks: range, placement: Placement | None) -> list[_Follower]:
    """The followers of other hosts, once all have come.

    Raises:
        RankError: some did not come in time.
    """
    secret, links = rank_messages.secret(), dict[tuple[int, str], Link]()
    deadline = time.monotonic() + rank_messages.CONNECT_SECONDS
    wanted = {(rank, use) for rank in ranks for use in (rank_messages.CONTROL, rank_messages.STEPS)}
    place = (args.master_addr, args.master_port) if placement is None else (placement.address, 0)
    with socket.create_server(place) as listener:
        if placement is not None:
            placement.start(listener.getsockname()[1], ranks)
        logger.info("waiting for ranks %d to %d at %s port %d", ranks[0], ranks[-1], *listener.getsockname()[:2])
        while missing := wanted - set(links):
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankError(f"rank {min(missing)[0]} has not come within {rank_messages.CONNECT_SECONDS:g} s")
            listener.settimeout(min(left, WATCH_SECONDS))
            with contextlib.suppress(TimeoutError):
                connection, (host, *_) = listener.accept()
                _meet(connection, host, secret, mesh, links, missing)
    return [
        _Follower(
            mesh.at(rank), links[rank, rank_messages.CONTROL], FarPost(links[rank, rank_messages.STEPS], args), None
        )
        for rank in ranks
    ]


def _meet(
    connection: socket.socket,
    host: str,
    secret: bytes,
    mesh: Mesh,
    links: dict[tuple[int, str], Link],
    missing: set[tuple[int, str]],
) -> None:
    """Shake hands with whoever has connected; one who is not wanted is turned away, and the others are waited for."""
    try:
        said = rank_messages.decode_hello(welcome(connection, secret))
        key, own = (said.rank, said.use), rank_messages.version()
        refusal = ""
        if said.version != own:
            refusal = f"it runs {said.version!r}, and the leader {own!r}: install the same on all hosts"
        elif key not in missing:
            refusal = f"rank {said.rank} is not awaited, or is there already"
        answer(connection, refusal)
        if refusal:
            raise RankError(f"rank {said.rank}: {refusal}")
        links[key] = Link(connection, mesh.at(said.rank).name)
    except RankError as error:
        connection.close()
        logger.log(logging.WARNING, "turned away a connection from %s: %s", host, error)


class FarPost:
    """Messages to a follower on another host."""

    def __init__(self, link: Link, args: EngineArgs) -> None:
        self.link, self._seconds = link, float(args.distributed_timeout_seconds)

    def send(self, kind: int, data: bytes) -> None:
        """See ``Post``. The system's buffers take what the steps in flight need."""
        self.link.send(kind, data, self._seconds)

    def close(self) -> None:
        """The follower sees it."""
        self.link.close()


def _leave(world: World, followers: list[_Follower]) -> None:
    for each in followers:
        if world.lost is None:
            with contextlib.suppress(RankError):
                each.post.send(STOP, b"")
    deadline = time.monotonic() + (EXIT_SECONDS if world.lost is None else WATCH_SECONDS)
    for each in followers:
        if each.child is not None:
            try:
                each.child.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                each.child.kill()
                each.child.wait()
        each.link.close()
        each.post.close()
