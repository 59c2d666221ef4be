"""A follower: a rank that runs what the leader decides. It has the same executor and no scheduler, requests or texts.

``python -m headway.engine.follower CONTROL BELL RING`` is started by ``headway.engine.ranks`` for ranks of its own host, with
two sockets and the memory of a ring. Ranks of other hosts come by ``headway.engine.node``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import Final, Protocol

import numpy as np

from headway.core.config import USUAL_THRESHOLDS, EngineArgs, Thresholds
from headway.core.errors import HeadwayError
from headway.core.log import logger, show
from headway.device.base import Device
from headway.device.select import select_device
from headway.engine import rank_messages
from headway.engine.world import START_SECONDS, World, device_of, mesh_of, watch_parent
from headway.parallel.group import RankError
from headway.parallel.keys import FarKeys, FileKeys
from headway.parallel.ring import Ring
from headway.parallel.wire import Link, greet
from headway.runner.executor import Running
from headway.runner.followers import LEARN, STEP, STOP
from headway.runner.launch import Launch
from headway.runner.runner import ModelRunner

IDLE_SECONDS: Final = 1.0
BUSY_SECONDS: Final = 50e-6
"""How long to listen for the next message before looking whether a step has ended."""
BEAT_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 2.0
"""How long a rank whose leader has gone may take to find it out by itself, and to end as it should."""


class Inbox(Protocol):
    """Where the leader's messages arrive, in order."""

    def receive(self, seconds: float) -> tuple[int, bytes] | None:
        """The next one's kind and bytes; None: none came in that time."""


def follow(runner: ModelRunner, inbox: Inbox, world: World) -> None:
    """Run what the leader sends until it says STOP.

    Raises:
        RankError: the world has come to an end.
    """
    running: deque[Running] = deque()
    executor, most = runner.executor, runner.config.max_in_flight - 1
    while True:
        message = inbox.receive(BUSY_SECONDS if running else IDLE_SECONDS)
        if message is None:
            world.check()
            if running and running[0].ticket.has_arrived():
                executor.collect(running.popleft())
            continue
        kind, data = message
        if kind == STEP:
            if len(running) == most:
                executor.collect(running.popleft())
            running.append(executor.run(Launch.decode(data)))
        elif kind == LEARN:
            executor.learn_words(np.frombuffer(data, np.int32))
        elif kind == STOP:
            while running:
                executor.collect(running.popleft())
            return
        else:
            raise RankError(f"the leader sent a message of kind {kind}, which no follower knows")


def serve(args: EngineArgs, world: World, inbox: Inbox, device: Device, thresholds: Thresholds) -> None:
    """Be a follower on ``device``, from weights to the end."""
    from headway.engine.boot import build_rank

    world.connect(device.torch_device)
    runner = build_rank(args, world, device, thresholds)
    try:
        follow(runner, inbox, world)
    finally:
        runner.release()
        world.close()


class Leader(Link):
    """The link with the leader. Once ``watch`` was called, each end tells the other that it lives."""

    _answers: queue.Queue[tuple[int, bytes]] | None = None

    def watch(self, own: str, seconds: float) -> None:
        """End this process, rank ``own``, when the leader has gone or has said nothing for so many seconds: the main thread may
        wait for it on a device. From now on ``receive`` gives only what answers a question."""
        self._own, self._seconds = own, seconds
        self._answers = queue.Queue()
        self._ended = threading.Event()
        self._heard = time.monotonic() + START_SECONDS  # until its first sign of life: it waits for other ranks before
        threading.Thread(target=self._beat, name="headway-beats", daemon=True).start()
        threading.Thread(target=self._listen, name="headway-listens", daemon=True).start()

    def receive(self, seconds: float | None = None) -> tuple[int, bytes] | None:
        """See ``Link``."""
        if self._answers is None:
            return super().receive(seconds)
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=seconds)
        return None

    def _beat(self) -> None:
        pause = min(BEAT_SECONDS, self._seconds / 4)
        while not self._ended.wait(pause):
            with contextlib.suppress(RankError):  # who listens learns of it
                self.send(rank_messages.BEAT, seconds=pause)
            silent = time.monotonic() - self._heard
            if silent > self._seconds:
                self._leave(f"{self.name} has not been heard of for {silent:.0f} s")

    def _listen(self) -> None:
        while True:
            try:
                message = super().receive()
            except RankError as error:
                if not self._ended.wait(LEAVE_SECONDS):
                    self._leave(str(error))
                return
            self._heard = time.monotonic()
            if message is not None and message[0] != rank_messages.BEAT and self._answers is not None:
                self._answers.put(message)

    def _leave(self, reason: str) -> None:
        logger.error("%s ends: %s", self._own, reason)
        os._exit(1)

    def end(self) -> None:
        """This rank ends by itself."""
        self._ended.set()


def run(link: Leader, inbox: Inbox, boot: rank_messages.Boot) -> int:
    """Be the follower that the leader's first message describes; the exit status."""
    args = boot.args
    mesh = mesh_of(args, boot.seat).at(boot.rank)
    if boot.log_level is not None:
        show(boot.log_format, boot.log_level)
    seconds = float(args.distributed_timeout_seconds)
    link.watch(mesh.name, seconds)
    try:
        keys = FarKeys(link, START_SECONDS) if boot.seat is None else FileKeys(boot.seat.folder)
        world = World(mesh, keys, seconds)
        device = select_device(device_of(args, boot.rank))
        with contextlib.closing(device):
            serve(args, world, inbox, device, USUAL_THRESHOLDS)
        return 0
    except BaseException as error:
        logger.error("%s ends: %s", mesh.name, error)
        details = "" if isinstance(error, HeadwayError | RankError) else f"\n{traceback.format_exc()}"
        with contextlib.suppress(RankError):
            link.send(rank_messages.FAILED, f"{type(error).__name__}: {error}{details}".encode(), seconds=BEAT_SECONDS)
        return 1
    finally:
        link.end()


def local(control: int, bell: int, memory: int) -> int:
    """Be a follower of a leader on this host; the file descriptors are inherited."""
    link = Leader(socket.socket(fileno=control), "the leader")
    inbox = Ring(memory, socket.socket(fileno=bell), "the leader")
    os.close(memory)
    return _booted(link, inbox)


def far(address: str, port: int, rank: int) -> int:
    """Be a follower of a leader on another host, which must know the secret in HEADWAY_RANK_SECRET."""
    secret = rank_messages.secret()
    ends = []
    for use in (rank_messages.CONTROL, rank_messages.STEPS):
        connection = rank_messages.connected(address, port)
        greet(connection, secret, rank_messages.hello(rank, use))
        ends.append(Leader(connection, "the leader"))
    return _booted(*ends)


def _booted(link: Leader, inbox: Inbox) -> int:
    message = link.receive(START_SECONDS)
    if message is None or message[0] != rank_messages.BOOT:
        raise RankError("the leader did not begin with what a follower needs")
    return run(link, inbox, rank_messages.decode_boot(message[1]))


def main(arguments: list[str]) -> int:
    """See the module; ``far ADDRESS PORT RANK`` for one of another host."""
    # Ctrl-C in a terminal goes to every process of the group; the leader decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if arguments[0] == "far":
            watch_parent(lambda: os._exit(1))
            return far(arguments[1], int(arguments[2]), int(arguments[3]))
        return local(*map(int, arguments))
    except RankError as error:
        logger.error("%s", error)
        sys.stderr.write(f"headway: {error}\n")
        return 1


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed. The interpreter's own end would stop threads within frames of C++ libraries, which aborts the process.
    os._exit(status)
