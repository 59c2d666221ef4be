"""The process behind ``kernels.compiler_process``: ``python -m headway.kernels.triton_compile_child``.

Reads jobs from standard input, a line of JSON each, and forks for each of them, as many at once as there are processors.
Writes a line of JSON for each that is done: its number, its seconds, and what went wrong. Ends with its input.
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
from collections import deque
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import cache
from triton.runtime.driver import driver

READ_BYTES, COMPLAINT_BYTES = 1 << 20, 2000


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
    """Import every module with kernels, so that no fork has to."""
    folder = Path(__file__).parent
    for path in sorted(folder.glob("*/*triton*.py")):
        with contextlib.suppress(ImportError):  # a kernel for another Triton
            importlib.import_module(f"headway.kernels.{path.parent.name}.{path.stem}")


def compile_kernel(job: dict[str, Any], launcher_cls: Any) -> None:
    """Compile, and build the launcher."""
    driver.set_active(CompilingDriver(GPUTarget(*job["target"]), launcher_cls))
    function = getattr(importlib.import_module(job["module"]), job["name"])
    kernel = function.preload(job["specialization"])
    if launcher_cls is not None:
        launcher_cls(kernel.src, kernel.metadata)


def fork(job: dict[str, Any], launcher_cls: Any) -> tuple[int, int]:
    """Compile in a process of its own; gives it, and the end of a pipe that says what went wrong and closes with it."""
    ours, theirs = os.pipe()
    if process := os.fork():
        os.close(theirs)
        return process, ours
    try:
        compile_kernel(job, launcher_cls)
    except BaseException as error:
        os.write(theirs, f"{type(error).__name__}: {error}".encode()[:COMPLAINT_BYTES])
    finally:
        os._exit(0)


def serve(requests: int, answers: int, launcher_cls: Any) -> None:
    """Read jobs from the file descriptor ``requests`` until its end; write about those that are done to ``answers``."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting: deque[tuple[int, dict[str, Any]]] = deque()
    running: dict[int, tuple[int, int, float]] = {}  # pipe -> process, number of the job, begin
    partial = b""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, READ_BYTES)
                if key.fd != requests:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    process, number, begin = running.pop(key.fd)
                    status = os.waitpid(process, 0)[1]
                    complaint = data.decode(errors="replace") or (f"it ended with status {status}" if status else "")
                    answer = [number, time.perf_counter() - begin, complaint]
                    os.write(answers, json.dumps(answer).encode() + b"\n")
                elif data:
                    *lines, partial = (partial + data).split(b"\n")
                    waiting.extend(json.loads(line) for line in lines)
                else:
                    return
            while waiting and len(running) < most:
                number, job = waiting.popleft()
                process, pipe = fork(job, launcher_cls)
                running[pipe] = process, number, time.perf_counter()
                selector.register(pipe, selectors.EVENT_READ)


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
