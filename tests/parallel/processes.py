"""Processes that tests of ranks look at, stop and kill."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

SECONDS = 60.0
"""How long anything may take before a test fails."""


def children(pid: int) -> list[int]:
    """Processes that ``pid`` has begun and that still run."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for path in found for each in path.read_text().split() if state(int(each)) not in ("Z", None)]


def state(pid: int) -> str | None:
    """Its letter in ps: T is stopped, Z has ended and was not waited for; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T", "it does not stop")


def ended(pid: int) -> None:
    """Wait until it has."""
    until(lambda: state(pid) in ("Z", None), f"process {pid} was left behind")


def until(holds: Callable[[], bool], otherwise: str) -> None:
    """Look again and again; AssertionError after ``SECONDS``."""
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.02)):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError(otherwise)


class Cable:
    """A network between two hosts, which can be cut or fall silent: TCP connections to ``port`` are led on to ``target``.

    Attributes:
        port: of the loopback, where it listens.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._silent = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._lead, args=(source, sink), daemon=True).start()

    def _lead(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self._silent.is_set():
                    sink.sendall(data)
            if not self._silent.is_set():
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        """Both ends see it at once."""
        for each in self._ends:
            each.shutdown(socket.SHUT_RDWR)

    def fall_silent(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._silent.set()

    def close(self) -> None:
        """The test is over."""
        for each in (self._listener, *self._ends):
            each.close()
