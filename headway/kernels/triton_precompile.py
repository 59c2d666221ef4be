"""Compiles the kernels of a rehearsal all at once, on all cores.

Triton compiles a kernel where it is first launched, one after the other: 0.1 to 1.4 s each, with a C compiler's run for each
new list of argument types. Here a rehearsal first runs with all launches left out: what is not compiled yet is noted, which
takes microseconds. A pool of threads then loads what lies in Triton's cache on the disk; what does not goes to
``compiler_process`` first. So the list of kernels comes from the code that launches them, and nobody keeps a second one.

It needs Triton's ``jit_cache_hook`` and ``JITFunction.preload`` (3.6, 3.7). Where they are missing nothing is noted: kernels
compile where they are first launched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime import cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from headway.core.log import logger
from headway.kernels.compiler_process import CompilerProcess, Job
from headway.kernels.triton_keys import settle_key

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

    def settle(self) -> None:
        """See ``triton_keys``."""
        settle_key(self._function)

    @property
    def job(self) -> Job:
        """It, as another process compiles it."""
        target = driver.active.get_current_target()
        words = (target.backend, target.arch, target.warp_size)
        return Job(self._function.module, self._function.fn.__qualname__, self._specialization, words)

    @property
    def size(self) -> int:
        """Characters of its source: a longer one takes longer, by and large."""
        return len(self._function.src)

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


class NotCachedError(Exception):
    """A kernel is not in Triton's cache on the disk."""


@contextmanager
def misses_raised(threads: set[int]) -> Iterator[None]:
    """Inside, a kernel that lacks in the cache on the disk raises NotCachedError in these threads instead of being compiled."""
    before = knobs.cache.manager_class

    class Finder(before or cache.FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> dict[str, str] | None:
            found: dict[str, str] | None = super().get_group(filename)
            if not found and threading.get_ident() in threads:
                raise NotCachedError
            return found

    knobs.cache.manager_class = Finder
    try:
        yield
    finally:
        knobs.cache.manager_class = before


def compile_kernels(
    kernels: Sequence[NotedKernel],
    on_done: Callable[[int], object] = lambda number: None,
    compiler: CompilerProcess | None = None,
) -> int:
    """Load all of ``kernels``, and compile those that have to be; ``on_done(1)`` is called after each, by this thread.

    Args:
        compiler: compiles what is not in the cache on the disk; None: the threads that load do.

    Returns:
        How many ``compiler`` compiled.

    Raises:
        whatever the first kernel that fails raises; those that have not begun are given up.
    """
    if not kernels:
        return 0
    for kernel in kernels:
        kernel.settle()
    threads: set[int] = set()
    size = min(len(kernels), MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(size, "headway-compile", lambda: threads.add(threading.get_ident())) as pool:
        try:
            missing = [] if compiler is None else _missing(kernels, pool, threads, on_done)
            if compiler is None:
                loads = [pool.submit(kernel.compile) for kernel in kernels]
            else:
                loads = _compiled(missing, compiler, pool)
            for done in as_completed(loads):
                done.result()
                on_done(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return len(missing)


def _compiled(
    missing: Sequence[NotedKernel], compiler: CompilerProcess, pool: ThreadPoolExecutor
) -> list[Future[None]]:
    """Have ``missing`` compiled elsewhere, and each loaded when it is."""
    begin, first, works, loads = time.perf_counter(), 0.0, [(0.0, "")], []
    for done in compiler.compile([kernel.job for kernel in missing]):
        kernel = missing[done.number]
        first = first or time.perf_counter() - begin - done.seconds
        works.append((done.seconds, kernel.name.rpartition(".")[2]))
        if done.complaint:
            logger.info("%s is compiled here: %s", kernel.name, done.complaint)
        loads.append(pool.submit(kernel.compile))
    if missing:
        total = sum(seconds for seconds, _ in works)
        longest = ", ".join(f"{name} {seconds:.1f}" for seconds, name in sorted(works, reverse=True)[:3])
        logger.info("the compiler began after %.1f s and took %.1f s; longest: %s", first, total, longest)
    return loads


def _missing(
    kernels: Sequence[NotedKernel], pool: ThreadPoolExecutor, threads: set[int], on_done: Callable[[int], object]
) -> list[NotedKernel]:
    """Load what is in the cache on the disk; gives the others, the longest first."""
    missing = []
    with misses_raised(threads):
        loads = {pool.submit(kernel.compile): kernel for kernel in kernels}
        for done in as_completed(loads):
            error = done.exception()
            if isinstance(error, NotCachedError):
                missing.append(loads[done])
            else:
                done.result()
                on_done(1)
    return sorted(missing, key=lambda kernel: -kernel.size)
