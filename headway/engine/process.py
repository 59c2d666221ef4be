"""``ProcessClient``: the engine in a process of its own.

The child is a fresh interpreter (``python -m headway.engine.child``), so nothing of the parent is inherited and a
user's script needs no ``if __name__ == "__main__"``. Three ipc sockets live in a private directory (mode 0700):
commands, reports, statistics. A socket pair, the leash, ties the two lives together: each end sees end-of-file when
the other process dies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref

import zmq

from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.errors import EngineDeadError
from headway.core.log import logger, shown_format
from headway.core.messages import AddRequest, EngineStats, ModelInfo, Update, ended_by
from headway.core.processes import processor_seconds
from headway.core.seat import Seat
from headway.engine import channel
from headway.engine.client import DEFAULT_FACTORY

MAX_IPC_PATH = 90
"""Unix socket paths end at 107 bytes on Linux and 103 on macOS; the file name takes some."""
LAST_WORDS_MS = 500
"""How long to look for a dead child's last message."""
EXIT_SECONDS = 10.0
"""How long the child may take to leave before it is killed."""
BOOT_EXIT_SECONDS = 1.0
"""The same while it is still starting and cannot hear us."""


class _Link:
    """The child process and everything that has to be freed with it. Knows nothing of its ProcessClient."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="headway-", dir=base if len(base) < MAX_IPC_PATH - 20 else "/tmp")
        self.context = zmq.Context(io_threads=1)
        # A connecting socket queues from the start; a bound one would block while there is no child.
        self.commands = self._open(zmq.PUSH)
        self.commands.connect(f"ipc://{self.folder}/commands")
        self.reports = self._open(zmq.PULL)
        self.reports.bind(f"ipc://{self.folder}/reports")
        self.stats = self._open(zmq.PULL)
        self.stats.bind(f"ipc://{self.folder}/stats")
        self.leash, child_end = socket.socketpair()
        self.wake, self.waker = socket.socketpair()
        self.booted = False
        self.closing = False
        self.polling = threading.RLock()
        self.sending = threading.Lock()
        self.asking = threading.Lock()
        with child_end:
            self.child = self._spawn(child_end)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self.context.socket(kind)
        opened.set_hwm(0)
        opened.linger = 0
        return opened

    def _spawn(self, child_end: socket.socket) -> subprocess.Popen[bytes]:
        # -P keeps the current directory out of the child's path unless the parent has it there too.
        command = [sys.executable, "-P", "-m", "headway.engine.child", self.folder, str(child_end.fileno())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # The child's standard output joins ours on stderr: ours may be a pipe that carries generated text.
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(child_end.fileno(),),
        )

    def send(self, command: channel.Command) -> None:
        data = channel.encode(command)
        with self.sending:
            if not self.closing:
                self.commands.send(data)

    def wait(self, source: zmq.Socket[bytes], timeout: float | None) -> bytes | None:
        """Next message of ``source``; None when ``timeout`` seconds passed, EndOfFile when the child is gone."""
        if source.poll(0):
            return source.recv()
        poller = zmq.Poller()
        for readable in (source, self.leash, self.wake):
            poller.register(readable, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout is None else int(timeout * 1000)))
        if self.closing:
            raise EngineDeadError("the engine is shut down")
        if source in ready:
            return source.recv()
        if ready:
            if source.poll(LAST_WORDS_MS):
                return source.recv()
            raise EOFError
        return None

    def obituary(self) -> EngineDeadError:
        try:
            code = self.child.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineDeadError("the engine process closed its connection")
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return EngineDeadError(f"the engine process {how}")

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.send(channel.Shutdown())
        self.closing = True
        self.waker.close()
        with self.polling, self.asking, self.sending:
            self._end_child()
            for open_socket in (self.commands, self.reports, self.stats):
                open_socket.close(linger=0)
            self.context.term()
            self.leash.close()
            self.wake.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end_child(self) -> None:
        try:
            self.child.wait(EXIT_SECONDS if self.booted else BOOT_EXIT_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.child.kill()
            self.child.wait()


class ProcessClient:
    """An engine in a subprocess; see ``EngineClient`` for the methods.

    Raises, on construction, what building the engine raised in the child (ConfigError, OutOfMemoryError, ...).

    Args:
        factory: "module:function" that builds the engine from EngineArgs; the child imports it.
        seat: which of several replicas that share experts it is.
    """

    info: ModelInfo

    def __init__(self, args: EngineArgs, factory: str = DEFAULT_FACTORY, seat: Seat | None = None) -> None:
        self._link = _Link()
        self._finalizer = weakref.finalize(self, self._link.close)
        self._open: set[str] = set()
        self._dead: EngineDeadError | None = None
        try:
            log_level = logger.getEffectiveLevel() if logger.hasHandlers() else None
            self._link.send(channel.Boot(args, factory, log_level, shown_format(), seat))
            report = self._receive(None)
            if isinstance(report, channel.Dead):
                raise channel.rebuild(report)
            if not isinstance(report, channel.Ready):
                raise EngineDeadError(f"the engine process began with {type(report).__name__} instead of Ready")
        except BaseException:
            self.close()
            raise
        self.info = report.info
        self._link.booted = True

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._link.child.pid

    def _check(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._link.closing:
            raise EngineDeadError("the engine is shut down")

    def _receive(self, timeout: float | None) -> channel.Report | None:
        with self._link.polling:
            self._check()
            try:
                data = self._link.wait(self._link.reports, timeout)
            except EOFError:
                self._dead = self._link.obituary()
                raise self._dead from None
        return None if data is None else channel.decode_report(data)

    def learn(self, vocabulary: Vocabulary) -> None:
        self._check()
        self._link.send(channel.Learn(vocabulary))

    def add(self, requests: list[AddRequest]) -> None:
        self._check()
        self._open.update(request.request_id for request in requests)
        self._link.send(channel.Add(requests))

    def abort(self, request_ids: list[str]) -> None:
        self._check()
        self._open.difference_update(request_ids)
        self._link.send(channel.Abort(request_ids))

    def poll(self, timeout: float | None = None) -> list[Update]:
        report = self._receive(timeout)
        if report is None:
            return []
        if isinstance(report, channel.Updates):
            updates = report.updates.parts()
            for update in updates:
                self._open.difference_update(ended_by(update))
            return updates
        message = report.message if isinstance(report, channel.Dead) else f"unexpected {type(report).__name__}"
        self._dead = EngineDeadError(f"the engine failed: {message}")
        raise self._dead

    def has_work(self) -> bool:
        return bool(self._open)

    def stats(self) -> EngineStats:
        """The engine's counters; waits until it has finished the step it is in."""
        with self._link.asking:
            self._check()
            self._link.send(channel.StatsRequest())
            try:
                data = self._link.wait(self._link.stats, None)
            except EOFError:
                raise EngineDeadError("the engine process is gone") from None
        assert data is not None
        return channel.decode_stats(data)

    def processor_seconds(self) -> float | None:
        return processor_seconds(self.pid)

    def close(self) -> None:
        self._finalizer()
