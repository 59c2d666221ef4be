"""The engine process: ``python -m headway.engine.child FOLDER LEASH_FD``, started by ``headway.engine.process``."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import threading
import traceback

import zmq

from headway.core.log import show
from headway.core.messages import RequestUpdate, StepUpdates
from headway.engine import channel
from headway.engine.client import Core, add_all, load_core

LINGER_MS = 2000
"""How long last words may take to leave the process."""

WATCH_MS = 500
"""How long an idle engine of several ranks sleeps before it looks whether they are all there."""


class Sockets:
    """The child's ends of the three sockets."""

    def __init__(self, folder: str) -> None:
        self.context = zmq.Context(io_threads=1)
        self.commands = self._open(zmq.PULL)
        self.commands.bind(f"ipc://{folder}/commands")
        self.reports = self._open(zmq.PUSH)
        self.reports.connect(f"ipc://{folder}/reports")
        self.stats = self._open(zmq.PUSH)
        self.stats.connect(f"ipc://{folder}/stats")

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self.context.socket(kind)
        opened.set_hwm(0)
        opened.linger = LINGER_MS
        return opened

    def receive(self, block: bool, most_ms: int | None = None, wakes: int | None = None) -> list[channel.Command]:
        """Every command that has arrived; with ``block``, at least one (asleep until then, or for ``most_ms``, or until the
        file descriptor ``wakes`` can be read)."""
        received: list[channel.Command] = []
        if block and wakes is not None:
            poller = zmq.Poller()
            for readable in (self.commands, wakes):
                poller.register(readable, zmq.POLLIN)
            poller.poll(most_ms)
            block = False
        while self.commands.poll(most_ms if block and not received else 0):
            received.append(channel.decode_command(self.commands.recv()))
        return received

    def report(self, report: channel.Report) -> None:
        self.reports.send(channel.encode(report))

    def close(self) -> None:
        for opened in (self.commands, self.reports, self.stats):
            opened.close()
        self.context.term()


def serve(core: Core, sockets: Sockets) -> None:
    """Run the engine until Shutdown arrives."""
    most_ms = WATCH_MS if getattr(core, "watches", False) else None
    wakes = getattr(core, "wakes", None)
    while True:
        refused: list[RequestUpdate] = []
        for command in sockets.receive(not core.has_work(), most_ms, wakes):
            if isinstance(command, channel.Add):
                refused += add_all(core, command.requests)
            elif isinstance(command, channel.Learn):
                core.learn(command.vocabulary)
            elif isinstance(command, channel.Abort):
                for request_id in command.request_ids:
                    core.abort(request_id)
            elif isinstance(command, channel.StatsRequest):
                sockets.stats.send(channel.encode(core.stats()))
            elif isinstance(command, channel.Shutdown):
                return
        updates = core.step() if core.has_work() else StepUpdates()
        updates.add(refused)
        if updates:
            sockets.report(channel.Updates(updates))


def run(sockets: Sockets) -> int:
    """Boot, serve, shut down; returns the exit status. Failures are reported to the parent, not printed."""
    core = None
    try:
        boot, *rest = sockets.receive(block=True)
        if not isinstance(boot, channel.Boot):
            raise TypeError(f"expected Boot, got {type(boot).__name__}")
        if rest:  # only a Shutdown can follow before the parent has seen Ready
            return 0
        if boot.log_level is not None:
            show(boot.log_format, boot.log_level)
        core = load_core(boot.factory, boot.args, boot.seat)
        gc.collect()
        gc.freeze()  # what boot built stays: a full collection that walks it inside the loop takes milliseconds
        sockets.report(channel.Ready(core.info))
        serve(core, sockets)
        return 0
    except BaseException as error:
        sockets.report(channel.describe(error, traceback.format_exc()))
        return 1
    finally:
        if core is not None:
            with contextlib.suppress(Exception):
                core.shutdown()


def _watch(leash: socket.socket, folder: str) -> None:
    """Die with the parent, whatever the main thread is doing, and clear away what it has left."""
    with contextlib.suppress(OSError):
        leash.recv(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(folder: str, leash_fd: int) -> int:
    """Be the engine process whose sockets lie in ``folder``; returns the exit status."""
    # Ctrl-C in a terminal goes to every process of the group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leash = socket.socket(fileno=leash_fd)
    leash.set_inheritable(False)
    threading.Thread(target=_watch, args=(leash, folder), name="headway-leash", daemon=True).start()
    sockets = Sockets(folder)
    try:
        return run(sockets)
    finally:
        sockets.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
