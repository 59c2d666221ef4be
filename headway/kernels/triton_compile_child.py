"""The process behind ``kernels.compiler_process``: ``python -m headway.kernels.triton_compile_child``.

Reads jobs from standard input, a line of JSON each, and hands them to forks of itself, one for each processor. Writes a line
of JSON for each that is done: its number, its seconds, and what went wrong. Ends with its input.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import threading
import time
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from headway.kernels import triton_stages as triton_stages  # part of kernels' names from Triton 3.7 on
from headway.kernels.triton_keys import settle_key

READ_BYTES, COMPLAINT_CHARACTERS = 1 << 20, 2000


class CompilingDriver:
    """Stands for the driver of a GPU that this process leaves alone.

    Attributes:
        launcher_cls: builds the code that launches a kernel; None: a launch will have to.
    """

    def __init__(self, target: GPUTarget, launcher_cls: Any) -> None:
        self._target, self.launcher_cls = target, launcher_cls

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


class Preparation(threading.Thread):
    """What all kernels need, beside the imports: Triton's hash, and its own C code that launchers ask for.

    Attributes:
        launcher_cls: None where there is no driver of a GPU.
    """

    def __init__(self) -> None:
        super().__init__(name="headway-prepare")
        self.launcher_cls: Any = None

    def run(self) -> None:
        """Prepare."""
        getattr(cache, "triton_key", lambda: None)()  # remembers the answer
        with contextlib.suppress(Exception):  # no libcuda, no C compiler: who launches will say so
            nvidia = importlib.import_module("triton.backends.nvidia.driver")
            nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher


def import_kernels() -> None:
    """Import every module with kernels, and hash these, so that no fork has to."""
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*/*triton*.py"), *folder.glob("*/hopper/*triton*.py")]):
        with contextlib.suppress(ImportError):  # a kernel for another Triton
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            module = importlib.import_module(f"headway.kernels.{name}")
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    settle_key(function)


def compile_kernel(job: dict[str, Any], launcher_cls: Any) -> None:
    """Compile, and build the launcher."""
    driver.set_active(CompilingDriver(GPUTarget(*job["target"]), launcher_cls))
    function = getattr(importlib.import_module(job["module"]), job["name"])
    settle_key(function)
    kernel = function.preload(job["specialization"])
    if launcher_cls is not None:
        launcher_cls(kernel.src, kernel.metadata)


def launcher_of(job: dict[str, Any]) -> str:
    """What tells its launcher from others: a C compiler's run, and kernels of equal argument types share one.

    Begun together, they would all find that there is none yet.
    """
    return json.dumps(json.loads(job["specialization"])["signature"])


def complaint_about(job: dict[str, Any], launcher_cls: Any) -> str:
    """Compile; gives what went wrong, if anything did."""
    try:
        compile_kernel(job, launcher_cls)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Worker:
    """A fork that compiles one kernel after the other.

    Attributes:
        said: file descriptor on which it says a line of JSON for each: what went wrong.
        number, began: of the job it has, None without one, and when it got it.
    """

    def __init__(self, launcher_cls: Any) -> None:
        jobs, self._jobs = os.pipe()
        self.said, words = os.pipe()
        self.number: int | None = None
        self.began = 0.0
        self._process = os.fork()
        if self._process:
            os.close(jobs)
            os.close(words)
            return
        try:
            os.close(self._jobs)  # its input ends with the process that forked it
            with os.fdopen(jobs, encoding="utf-8") as lines:
                for line in lines:
                    os.write(words, json.dumps(complaint_about(json.loads(line), launcher_cls)).encode() + b"\n")
        finally:
            os._exit(0)

    def begin(self, number: int, job: dict[str, Any]) -> None:
        """Have it compile ``job``."""
        self.number, self.began = number, time.perf_counter()
        with contextlib.suppress(OSError):  # it has died: ``answer`` will see
            os.write(self._jobs, json.dumps(job).encode() + b"\n")

    def answer(self) -> tuple[str, bool]:
        """What went wrong with the job it had, once ``said`` is readable; and whether it lives on."""
        data = b""
        while not data.endswith(b"\n"):
            part = os.read(self.said, READ_BYTES)
            if not part:
                os.close(self.said)
                os.close(self._jobs)
                return f"its process ended with status {os.waitpid(self._process, 0)[1]}", False
            data += part
        return str(json.loads(data)), True


def serve(requests: int, answers: int, launcher_cls: Any) -> None:
    """Read jobs from the file descriptor ``requests`` until its end; write about those that are done to ``answers``."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # First those with a launcher of their own, then the longest.
    waiting: list[tuple[bool, int, int, dict[str, Any]]] = []
    launchers: set[str] = set()
    workers: dict[int, Worker] = {}  # by what they say
    idle: list[Worker] = []
    partial = b""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != requests:
                    worker = workers[key.fd]
                    number, began = worker.number, worker.began
                    complaint, alive = worker.answer()
                    if alive:
                        idle.append(worker)
                    else:
                        selector.unregister(key.fd)
                        del workers[key.fd]
                    answer = [number, time.perf_counter() - began, complaint[:COMPLAINT_CHARACTERS]]
                    os.write(answers, json.dumps(answer).encode() + b"\n")
                    continue
                data = os.read(requests, READ_BYTES)
                if not data:
                    return
                *lines, partial = (partial + data).split(b"\n")
                for line in lines:
                    number, job = json.loads(line)
                    launcher = launcher_of(job)
                    heappush(waiting, (launcher in launchers, -job["size"], number, job))
                    launchers.add(launcher)
            while waiting and (idle or len(workers) < most):
                if not idle:
                    idle.append(Worker(launcher_cls))
                    workers[idle[0].said] = idle[0]
                    selector.register(idle[0].said, selectors.EVENT_READ)
                _, _, number, job = heappop(waiting)
                idle.pop().begin(number, job)


def main() -> None:
    """Be the process."""
    gc.disable()  # what is here stays; imports are a sixth faster
    requests, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # the compiler talks, when it fails
        os.dup2(nowhere, standard)
    preparation = Preparation()
    preparation.start()
    import_kernels()
    preparation.join()
    gc.freeze()
    serve(requests, answers, preparation.launcher_cls)


if __name__ == "__main__":
    main()
