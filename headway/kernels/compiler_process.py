"""A process that compiles Triton's kernels, many at once. Imports no Triton, and no torch, so that it can begin before them.

Threads of one process share Python's lock, a fifth of the compiler's work, and its allocator: sixteen of them compile three
times as fast as one. The process here imports all that a compiler needs and forks instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO

CHILD = "headway.kernels.triton_compile_child"
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process that forks has no threads."""


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile.

    Attributes:
        module, name: of its function.
        specialization: as ``JITFunction.preload`` takes it.
        target: backend, architecture and warp size of the GPU.
        size: characters of its source. Of jobs that wait the longest begins, as it takes longest, by and large.
    """

    module: str
    name: str
    specialization: str
    target: tuple[str, int | str, int]
    size: int = 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """A job that is done.

    Attributes:
        seconds: it took.
        complaint: what went wrong; empty if nothing did.
    """

    seconds: float = 0.0
    complaint: str = ""


GONE = Compiled(complaint="the compiler's process is gone")
OnDone = Callable[[Compiled], object]


class _Waiting:
    """Who waits for which job; shared with the thread that reads answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: dict[int, OnDone] = {}
        self._number, self._gone = 0, False

    def add(self, on_done: OnDone) -> int | None:
        """The job's number; None: nobody will answer any more."""
        with self._lock:
            if self._gone:
                return None
            self._number += 1
            self._callers[self._number] = on_done
            return self._number

    def read(self, answers: IO[bytes]) -> None:
        """Tell everyone, until there are no more answers; then tell the rest that there will be none."""
        try:
            while line := answers.readline():
                with contextlib.suppress(ValueError, TypeError):  # an import over there may print what it likes
                    number, seconds, complaint = json.loads(line)
                    self._tell(number, Compiled(seconds, complaint))
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Tell all who wait that there will be no answer, and whoever comes."""
        with self._lock:
            self._gone, rest = True, list(self._callers)
        for number in rest:
            self._tell(number, GONE)

    def _tell(self, number: int, done: Compiled) -> None:
        with self._lock:
            on_done = self._callers.pop(number, None)
        if on_done is not None:
            on_done(done)


class CompilerProcess:
    """The process. It ends with this object, or when ``close`` is called.

    What it compiles lies in Triton's cache on the disk. Who asks for a kernel that it could not compile will meet the error.
    """

    def __init__(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its forks end with it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self._writing = self._process.stdin, threading.Lock()
        self._waiting = _Waiting()
        self._reader = threading.Thread(
            target=self._waiting.read, args=(self._process.stdout,), name="headway-compiled", daemon=True
        )
        self._reader.start()
        self._end = weakref.finalize(self, _end, self._process, self._reader, self._waiting)

    def submit(self, job: Job, on_done: OnDone) -> None:
        """Have ``job`` compiled; ``on_done`` is called when it is, by another thread, or at once if the process has died."""
        number = self._waiting.add(on_done)
        if number is None:
            on_done(GONE)
            return
        line = json.dumps([number, asdict(job)]) + "\n"
        with self._writing, contextlib.suppress(OSError):  # it is gone: whoever reads its answers will see
            self._jobs.write(line.encode())
            self._jobs.flush()

    def close(self) -> None:
        """End the process. What it is compiling is given up."""
        self._end()


def _end(process: subprocess.Popen[bytes], reader: threading.Thread, waiting: _Waiting) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    waiting.give_up()
    if reader is not threading.current_thread():
        reader.join()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # there is something left to write, and nobody to read it
                pipe.close()
