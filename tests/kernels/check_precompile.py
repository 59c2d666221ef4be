"""Checks of ``kernels.triton_precompile`` with Triton's compiler, each by name; run by ``test_triton_precompile``."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from headway.kernels.apply_edits.triton import apply_edits, apply_edits_kernel
from headway.kernels.compiler_process import Compiled, CompilerProcess, Job, OnDone
from headway.kernels.triton_keys import settle_key
from headway.kernels.triton_precompile import (
    Compilation,
    NotedKernel,
    compiling,
    hash_compiler,
    launches_noted,
    only_noted,
)
from tests.kernels.no_gpu import NoDriver


@triton.jit
def add_kernel(x, number, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = x + tl.arange(0, SIZE)
    tl.store(at, tl.load(at) + number)


@triton.jit
def wrong_kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, SIZE), missing)  # type: ignore[name-defined]  # noqa: F821


OFFSET = tl.constexpr(3)


@triton.jit
def shifted(number):  # type: ignore[no-untyped-def]
    return number + OFFSET


@triton.jit
def calling_kernel(x, number):  # type: ignore[no-untyped-def]
    tl.store(x, shifted(number))


def launch(size: int) -> None:
    add_kernel[(1,)](torch.empty(size), 3, SIZE=size)


def in_thread(function: Any, *args: Any) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def compile_launches(*sizes: int, compiler: CompilerProcess | None = None) -> Compilation:
    """Note launches of ``add_kernel`` of these sizes, and compile what is noted."""
    with compiling(compiler) as compilation:
        with launches_noted(compilation.add):
            for size in sizes:
                launch(size)
        compilation.finish()
    return compilation


def noted_kernels_compile_once(launched: list[str]) -> None:
    numbers: list[int] = []
    names: list[str] = []

    def take(kernel: NotedKernel) -> None:
        names.append(kernel.name)
        compilation.add(kernel)

    with compiling() as compilation:
        with launches_noted(take):
            for size in (16, 32, 16, 32):
                launch(size)
        assert names == [f"{__name__}.add_kernel"] * 2 and launched == []
        compilation.finish(numbers.append)
    assert numbers == [1, 1]
    with patch.object(knobs.runtime, "jit_cache_hook", lambda **facts: sys.exit("compiled again")):
        launch(16)
        launch(32)
    assert launched == ["add_kernel"] * 2


def noted_kernels_compile_while_others_are_noted(launched: list[str]) -> None:
    with compiling() as compilation, launches_noted(compilation.add):
        launch(16)
        compilation.finish()  # before the last is noted
        launch(32)
        compilation.finish()
    assert launched == [] and compilation.num_kernels == 2


def launches_of_compiled_kernels_are_left_out_too(launched: list[str]) -> None:
    launch(16)
    noted: list[Any] = []
    with launches_noted(noted.append):
        launch(16)
    assert noted == [] and launched == ["add_kernel"]


def what_is_not_compiled_afterwards_compiles_on_use(launched: list[str]) -> None:
    try:
        with launches_noted(lambda kernel: None):
            launch(16)
            raise KeyError
    except KeyError:
        launch(16)
    assert launched == ["add_kernel"]


def other_threads_launch_as_ever(launched: list[str]) -> None:
    noted: list[Any] = []
    elsewhere: list[bool] = []
    with launches_noted(noted.append):
        in_thread(lambda: elsewhere.append(only_noted()))
        assert only_noted() and elsewhere == [False]
        in_thread(launch, 16)
        assert launched == ["add_kernel"] and noted == []
        launch(32)
        in_thread(launch, 32)
        assert launched == ["add_kernel"] * 2 and len(noted) == 1
    assert not only_noted()


def errors_are_raised(launched: list[str]) -> None:
    with pytest.raises(triton.CompilationError, match="missing is not defined") as caught, compiling() as compilation:
        with launches_noted(compilation.add):
            wrong_kernel[(1,)](torch.empty(16), SIZE=16)
            launch(16)
        compilation.finish()
    assert caught.value.__notes__ == [f"while compiling {__name__}.wrong_kernel"]


def the_disk_keeps_what_an_ordinary_launch_finds(launched: list[str]) -> None:
    compile_launches(16)
    add_kernel.device_caches.clear()
    found: list[bool] = []
    with patch.object(knobs.compilation, "listener", lambda cache_hit, **facts: found.append(cache_hit)):
        launch(16)
    assert found == [True]


def the_compiler_is_hashed_once(launched: list[str]) -> None:
    triton_key.cache_clear()
    hash_compiler()
    launch(16)
    assert triton_key.cache_info().misses == 1


class Watched(CompilerProcess):
    """A compiler's process whose jobs are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[str] = []
        self.complaints: list[str] = []

    def submit(self, job: Job, on_done: OnDone) -> None:
        def told(done: Compiled) -> None:
            self.complaints.append(done.complaint)
            on_done(done)

        self.jobs.append(job.name)
        super().submit(job, told)


def what_is_not_on_the_disk_goes_to_the_compiler(launched: list[str]) -> None:
    packed = torch.zeros(32, dtype=torch.int32)
    compiler = Watched()
    hits: list[bool] = []
    try:
        for wanted in (["apply_edits_kernel"], []):
            apply_edits_kernel.device_caches.clear()
            listener = patch.object(knobs.compilation, "listener", lambda cache_hit, **facts: hits.append(cache_hit))
            with listener, compiling(compiler) as compilation:
                with launches_noted(compilation.add):
                    apply_edits(torch.zeros(64, dtype=torch.int32), packed, 3)
                compilation.finish()
            assert compiler.jobs == wanted and compilation.num_compiled == len(wanted)
            compiler.jobs.clear()
    finally:
        compiler.close()
    assert compiler.complaints == [""] and hits == [True, True]


def what_the_compiler_cannot_compile_is_compiled_here(launched: list[str]) -> None:
    compiler = Watched()
    assert compile_launches(64, compiler=compiler).num_compiled == 1  # its module is another one over there
    assert "add_kernel" in compiler.complaints[0]
    compiler.close()
    launch(64)
    assert launched == ["add_kernel"]


def a_dead_compiler_is_replaced_by_threads(launched: list[str]) -> None:
    compiler = Watched()
    compiler._process.kill()
    assert compile_launches(128, 256, compiler=compiler).num_compiled == 2
    assert compiler.complaints == ["the compiler's process is gone"] * 2
    compiler.close()
    assert not compiler._reader.is_alive()


def what_nobody_waits_for_any_more_is_given_up(launched: list[str]) -> None:
    packed, compiler = torch.zeros(32, dtype=torch.int32), Watched()
    apply_edits_kernel.device_caches.clear()
    with pytest.raises(KeyError), compiling(compiler) as compilation, launches_noted(compilation.add):
        apply_edits(torch.zeros(128, dtype=torch.int32), packed, 7)
        raise KeyError
    assert compiler._reader.is_alive(), "an answer that comes too late ends nothing"
    compiler.close()


def key_after(first: Sequence[Any], settle: bool) -> str:
    """The name of ``calling_kernel`` when the functions in ``first`` were hashed before."""
    for function in (shifted, calling_kernel):
        function.hash, function.used_global_vals = None, {}
    for function in first:
        _ = function.cache_key
    if settle:
        settle_key(calling_kernel)
    return str(calling_kernel.cache_key)


def names_do_not_depend_on_what_was_hashed_before(launched: list[str]) -> None:
    assert key_after([], True) == key_after([shifted], True) == key_after([shifted], False)
    assert key_after([], False) != key_after([shifted], False), "Triton has mended it: triton_keys can go"


def launchers_are_made_in_turn(launched: list[str]) -> None:
    """Triton's are modules of one name, which threads that make some at once confuse."""
    active, together = driver.active, threading.Barrier(2)
    make = active.launcher_cls

    def met(*args: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.3)
            launched.append("two at once")
        return make(*args)

    with patch.object(active, "launcher_cls", met):
        compile_launches(16, 32)
    assert launched == [] and active.launcher_cls == make


def another_triton_compiles_on_use(launched: list[str]) -> None:
    preload = JITFunction.preload
    del JITFunction.preload
    try:
        noted: list[Any] = []
        with launches_noted(noted.append):
            launch(16)
    finally:
        JITFunction.preload = preload
    assert noted == [] and launched == ["add_kernel"]


def main() -> None:
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
    checks = [
        noted_kernels_compile_once,
        noted_kernels_compile_while_others_are_noted,
        launches_of_compiled_kernels_are_left_out_too,
        what_is_not_compiled_afterwards_compiles_on_use,
        other_threads_launch_as_ever,
        errors_are_raised,
        the_disk_keeps_what_an_ordinary_launch_finds,
        the_compiler_is_hashed_once,
        what_is_not_on_the_disk_goes_to_the_compiler,
        what_the_compiler_cannot_compile_is_compiled_here,
        a_dead_compiler_is_replaced_by_threads,
        what_nobody_waits_for_any_more_is_given_up,
        names_do_not_depend_on_what_was_hashed_before,
        launchers_are_made_in_turn,
        another_triton_compiles_on_use,
    ]
    for check in checks:
        for kernel in (add_kernel, wrong_kernel):
            kernel.device_caches.clear()
        nothing = NoDriver()
        driver.set_active(nothing)
        check(nothing.launched)
        assert JITFunction.run is run and knobs.runtime.jit_cache_hook is hook
        print(check.__name__)


if __name__ == "__main__":
    main()
