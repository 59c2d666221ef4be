"""Compiles the kernels of a rehearsal all at once, on all cores.

Triton compiles a kernel where it is first launched, one after the other: 0.1 to 1.4 s each, with a C compiler's run for each
new list of argument types. Here a rehearsal first runs with all launches left out: what is not compiled yet is noted, which
takes microseconds. From then on a pool of threads loads what lies in Triton's cache on the disk; what does not goes to
``compiler_process`` first. So the list of kernels comes from the code that launches them, and nobody keeps a second one.

It needs Triton's ``jit_cache_hook`` and ``JITFunction.preload`` (3.6, 3.7). Where they are missing nothing is noted: kernels
compile where they are first launched.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime import cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from headway.core.log import logger
from headway.kernels import triton_stages as triton_stages  # part of kernels' names from Triton 3.7 on
from headway.kernels.compiler_process import Compiled, CompilerProcess, Job
from headway.kernels.triton_keys import settle_key

MAX_THREADS = 16
"""More would wait for Python's lock."""


Ready = Callable[[], object]


def only_noted() -> bool:
    """Whether launches of this thread do nothing but name their kernels: steps of other sizes may name theirs, too."""
    hook = getattr(knobs.runtime, "jit_cache_hook", None)
    return getattr(hook, "owner", None) == threading.get_ident()


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
        function = self._function
        return Job(function.module, function.fn.__qualname__, self._specialization, words, len(function.src))

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
def launches_noted(take: Callable[[NotedKernel], object]) -> Iterator[None]:
    """Inside, this thread's Triton launches do nothing; ``take`` is called with what they would have had to compile.

    Only the host's part of the code inside counts: what kernels would have written is not written.
    """
    if not (hasattr(knobs.runtime, "jit_cache_hook") and hasattr(JITFunction, "preload")):
        yield
        return
    owner, launch, hook_before = threading.get_ident(), JITFunction.run, knobs.runtime.jit_cache_hook

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or threading.get_ident() == owner, **kwargs)

    def note(**facts: Any) -> bool | None:
        if threading.get_ident() == owner:
            kernel = facts["compile"]
            data = kernel["specialization_data"]
            take(NotedKernel(facts["fn"].jit_function, kernel["device"], kernel["key"], data))
            return True  # do not compile
        return hook_before(**facts) if hook_before is not None else None

    note.owner = owner  # type: ignore[attr-defined]  # what ``only_noted`` asks for
    JITFunction.run, knobs.runtime.jit_cache_hook = run, note
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook_before


class NotCachedError(Exception):
    """A kernel is not in Triton's cache on the disk."""


@contextmanager
def misses_raised(looking: threading.local) -> Iterator[None]:
    """Inside, a kernel that lacks in the cache on the disk raises NotCachedError in threads whose ``looking.only`` is set,
    instead of being compiled."""
    before = knobs.cache.manager_class

    class Finder(before or cache.FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> dict[str, str] | None:
            found: dict[str, str] | None = super().get_group(filename)
            if not found and getattr(looking, "only", False):
                raise NotCachedError
            return found

    knobs.cache.manager_class = Finder
    try:
        yield
    finally:
        knobs.cache.manager_class = before


@contextmanager
def launchers_in_turn() -> Iterator[None]:
    """Inside, threads make Triton's launchers one after the other.

    Triton's launchers are extension modules of one name. Python keeps one module of that name and writes into it what each of
    them exports, so a thread that makes one beside another could take the other's function, and its kernel would be launched
    with the arguments of another.
    """
    active, turn = driver.active, threading.Lock()
    make = active.launcher_cls

    def in_turn(*args: Any) -> Any:
        with turn:
            return make(*args)

    active.launcher_cls = in_turn
    try:
        yield
    finally:
        active.launcher_cls = make


class Compilation:
    """Loads kernels, and has those compiled that must be, each from when it is added. Made by ``compiling``."""

    def __init__(
        self, pool: ThreadPoolExecutor, looking: threading.local, compiler: CompilerProcess | None, ready: Ready
    ) -> None:
        self._pool, self._looking, self._compiler, self._ready = pool, looking, compiler, ready
        self._loads: list[Future[None]] = []
        self._works: list[tuple[float, str]] = []

    @property
    def num_kernels(self) -> int:
        """How many were added."""
        return len(self._loads)

    @property
    def num_compiled(self) -> int:
        """How many of them the compiler was given, and has answered."""
        return len(self._works)

    def add(self, kernel: NotedKernel) -> None:
        """Begin with ``kernel``."""
        kernel.settle()
        loaded: Future[None] = Future()
        self._loads.append(loaded)
        self._pool.submit(self._try, self._begin, kernel, loaded)

    def finish(
        self,
        on_done: Callable[[int], object] = lambda number: None,
        on_failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        """Wait until all are loaded; ``on_done(1)`` is called after each, by this thread.

        Args:
            on_failed: called with what a kernel that fails raises; the others go on.

        Raises:
            whatever the first kernel that fails raises, unless ``on_failed`` takes it.
        """
        for loaded in as_completed(self._loads):
            error = loaded.exception()
            if error is not None:
                if on_failed is None:
                    raise error
                on_failed(error)
            on_done(1)
        if self._works:
            total = sum(seconds for seconds, _ in self._works)
            longest = ", ".join(f"{name} {seconds:.1f}" for seconds, name in sorted(self._works, reverse=True)[:3])
            logger.info("the compiler took %.1f s over all its processes; longest: %s", total, longest)

    def _try(self, step: Callable[..., object], kernel: NotedKernel, loaded: Future[None], *more: Any) -> None:
        """Take a step towards ``loaded``."""
        try:
            step(kernel, loaded, *more)
        except BaseException as error:
            loaded.set_exception(error)

    def _begin(self, kernel: NotedKernel, loaded: Future[None]) -> None:
        self._ready()
        compiler, self._looking.only = self._compiler, self._compiler is not None
        try:
            kernel.compile()
        except NotCachedError:
            assert compiler is not None
            compiler.submit(kernel.job, lambda done: self._answered(kernel, loaded, done))
            return
        finally:
            self._looking.only = False
        loaded.set_result(None)

    def _answered(self, kernel: NotedKernel, loaded: Future[None], done: Compiled) -> None:
        with contextlib.suppress(RuntimeError):  # the pool was shut down: nobody waits for this any more
            self._pool.submit(self._try, self._end, kernel, loaded, done)

    def _end(self, kernel: NotedKernel, loaded: Future[None], done: Compiled) -> None:
        self._works.append((done.seconds, kernel.name.rpartition(".")[2]))
        if done.complaint:
            logger.info("%s is compiled here: %s", kernel.name, done.complaint)
        kernel.compile()
        loaded.set_result(None)


@contextmanager
def compiling(compiler: CompilerProcess | None = None, ready: Ready = lambda: None) -> Iterator[Compilation]:
    """Inside, kernels can be added. What has not begun when an exception leaves the context is given up.

    Args:
        compiler: compiles what is not in the cache on the disk; None: the threads that load do.
        ready: returns when the first kernel may be looked for.
    """
    looking = threading.local()
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with misses_raised(looking), launchers_in_turn(), ThreadPoolExecutor(threads, "headway-compile") as pool:
        try:
            yield Compilation(pool, looking, compiler, ready)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
