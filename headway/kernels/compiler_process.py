"""A process that compiles Triton's kernels, many at once. Imports no Triton, and no torch, so that it can begin before them.

Threads of one process share Python's lock, a fifth of the compiler's work, and its allocator: sixteen of them compile three
times as fast as one. The process here imports all that a compiler needs and forks instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

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
    """

    module: str
    name: str
    specialization: str
    target: tuple[str, int | str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A job that is done.

    Attributes:
        number: of the job.
        seconds: it took.
        complaint: what went wrong; empty if nothing did.
    """

    number: int
    seconds: float = 0.0
    complaint: str = ""


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
        )
        self._end = weakref.finalize(self, _end, self._process)

    def compile(self, jobs: Sequence[Job]) -> Iterator[Compiled]:
        """Compile ``jobs``, begun in this order; each is given when it is done. One call at a time.

        Should the process die, the rest is given at once.
        """
        waiting = set(range(len(jobs)))
        assert self._process.stdin is not None and self._process.stdout is not None
        lines = "".join(json.dumps([number, asdict(job)]) + "\n" for number, job in enumerate(jobs))
        with contextlib.suppress(OSError):  # it is gone
            self._process.stdin.write(lines.encode())
            self._process.stdin.flush()
        while waiting and (line := self._process.stdout.readline()):
            done = Compiled(*json.loads(line))
            waiting.discard(done.number)
            yield done
        yield from (Compiled(number, complaint="the compiler's process is gone") for number in sorted(waiting))

    def close(self) -> None:
        """End the process. What it is compiling is given up."""
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # there is something left to write, and nobody to read it
                pipe.close()
    process.wait()
