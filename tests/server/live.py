"""A server in a process of its own, watched through its log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

import httpx

from tests.engine.fake_core import ROOT

SECONDS = 60.0
"""How long anything may take before the test fails."""


class Live:
    """One server process.

    Attributes:
        url: where it listens, known when it is ready.
        lines: its log so far.
    """

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.url = ""
        self._grown = threading.Condition()
        self._ended = False
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADWAY")}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": ROOT, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """The ``count``-th line that matches; AssertionError when the process ends or takes too long."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._grown:
            self._grown.wait_for(lambda: len(found()) >= count or self._ended, SECONDS)
            matches = found()
        assert len(matches) >= count, f"no {pattern!r} in:\n" + "\n".join(self.lines)
        return matches[count - 1]

    def wait_ready(self, count: int = 1) -> Live:
        self.url = self.wait_for(r"ready on (https?://[^\"\s]+)", count)[1]
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def engine_pid(self, count: int = 1) -> int:
        return int(self.wait_for(r"engine process (\d+)", count)[1])

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        status = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return status

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=SECONDS, **options)

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def live_parrot(*interpreter: str, **settings: Any) -> Live:
    """The server over the parrot engine; ``interpreter`` are Python's own flags."""
    return Live([*interpreter, "-m", "tests.server.parrot", json.dumps({"port": 0, **settings})])
