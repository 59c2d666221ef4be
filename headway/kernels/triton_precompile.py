"""Compiles the kernels of a rehearsal all at once, on all cores.

Triton compiles a kernel where it is first launched, one after the other: 0.1 to 1.2 s each, with a C compiler's run for each
new list of argument types. Here a rehearsal first runs with all launches left out: what is not compiled yet is noted, which
takes microseconds. A pool of threads then compiles what was noted: Triton's passes and the assembler, most of the time, run
beside each other; only the part in Python, a fifth, does not. So the list of kernels comes from the code that launches them,
and nobody keeps a second one.

It needs Triton 3.6's ``jit_cache_hook`` and ``JITFunction.preload``. Where they are missing nothing is noted, and kernels
compile where they are first launched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime import cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

MAX_THREADS = 16
"""More would wait for Python's lock."""


class NotedKernel:
    """A specialisation that was asked for and is not compiled yet.

    It lies in Triton's memory of compiled kernels until it is one of them: asking for it again costs no more than a look.

    Attributes:
        name: of the kernel's function, with its module.
    """

    def __init__(self, function: Any, device: int, key: str, specialization: str) -> None:
        self.name = f"{function.module}.{function.fn.__qualname__}"
        self._function, self._device, self._specialization = function, device, specialization
        function.device_caches[device][0][key] = self

    def result(self) -> Any:
        """The kernel. Triton asks this of a kernel in the making at its launch: by another thread, or after all was noted."""
        return self._function.preload(self._specialization)

    def compile(self) -> None:
        """Compile it, or read it from Triton's cache on the disk, and load it onto the device."""
        driver.active.set_current_device(self._device)  # each thread has its own
        try:
            _ = self.result().run  # builds the launcher and loads the binary: not while a graph is captured
        except BaseException as error:
            error.add_note(f"while compiling {self.name}")
            raise


def hash_compiler() -> None:
    """Let Triton hash itself, 400 MB: it names the entries of its cache by that, so nothing compiles or loads before."""
    getattr(cache, "triton_key", lambda: None)()  # remembers the answer


@contextmanager
def launches_noted() -> Iterator[list[NotedKernel]]:
    """Inside, this thread's Triton launches do nothing; what they would have had to compile is in the list at the end.

    Only the host's part of the code inside counts: what kernels would have written is not written.
    """
    noted: list[NotedKernel] = []
    if not (hasattr(knobs.runtime, "jit_cache_hook") and hasattr(JITFunction, "preload")):
        yield noted
        return
    owner, launch, hook_before = threading.get_ident(), JITFunction.run, knobs.runtime.jit_cache_hook

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or threading.get_ident() == owner, **kwargs)

    def note(**facts: Any) -> bool | None:
        if threading.get_ident() == owner:
            kernel = facts["compile"]
            data = kernel["specialization_data"]
            noted.append(NotedKernel(facts["fn"].jit_function, kernel["device"], kernel["key"], data))
            return True  # do not compile
        return hook_before(**facts) if hook_before is not None else None

    JITFunction.run, knobs.runtime.jit_cache_hook = run, note
    try:
        yield noted
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook_before


def compile_kernels(kernels: Sequence[NotedKernel], on_done: Callable[[int], object] = lambda number: None) -> None:
    """Compile all of ``kernels``; ``on_done(1)`` is called after each, by this thread.

    Raises:
        whatever the first kernel that fails raises; those that have not begun are given up.
    """
    if not kernels:
        return
    with ThreadPoolExecutor(min(len(kernels), MAX_THREADS, os.cpu_count() or 1), "headway-compile") as pool:
        try:
            for done in as_completed([pool.submit(kernel.compile) for kernel in kernels]):
                done.result()
                on_done(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
