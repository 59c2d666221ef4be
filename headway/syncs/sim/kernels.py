"""Triton kernels that a program launches: Triton's own interpreter runs them, on the CPU values.

Nothing here imports Triton: when the program does, what launches its kernels is replaced. A launch is no wait, as on a card;
an autotuner's measuring is one, and keeps the first configuration, because there is no speed to measure. What the interpreter
cannot run is refused, and the run proves nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, Final

import torch

from headway.syncs.findings import Kind
from headway.syncs.sim import backend
from headway.syncs.sim.pins import PINS
from headway.syncs.sim.streams import Report
from headway.syncs.sim.tensor import TAPE, SimTensor

_LOCK: Final = threading.RLock()
"""The interpreter has one grid for the whole process."""


class _Running(threading.local):
    """Whether a kernel is under way on this thread: the functions that it calls are its parts then."""

    kernel: str = ""


_RUNNING: Final = _Running()


class _Compiled:
    """What a launch gives back. There is no machine code to look at."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, what: str) -> Any:
        raise backend.refuse(f"the simulation compiles no Triton kernel: {self._name} has no {what}. Run on a GPU")


def _refused(name: str, why: object) -> Exception:
    return backend.refuse(
        f"the simulation runs Triton kernels in Triton's interpreter, which cannot run {name}: {why}. Run on a GPU, without "
        "--simulate, or let the program take its way without Triton here"
    )


def _values(value: Any, place: int) -> Any:
    """An argument with the CPU's tensors in it.

    Raises:
        ValueError: a kernel cannot reach the host's memory, unless it is pinned.
    """
    if isinstance(value, SimTensor):
        return value.held
    if isinstance(value, torch.Tensor):
        if value.numel() and value.device.type == "cpu" and value not in PINS:
            raise ValueError(f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)")
        return value
    if isinstance(value, tuple):
        parts = [_values(part, place) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    base = getattr(value, "base", None)  # of descriptors of tiles, and of tensors read as another dtype
    if not isinstance(base, SimTensor):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, base=base.held)
    return type(value)(base.held, value.dtype)


def _launch(interpreter: Any) -> Callable[..., Any]:
    """``kernel.run``: what ``kernel[grid](...)`` calls."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        name = kernel.fn.__name__
        if warmup:
            return _Compiled(name)
        if "gluon" in type(kernel).__module__ or type(kernel).__name__.startswith("Gluon"):
            raise _refused(name, "it is written in Gluon")
        for hook in kernel.pre_run_hooks:
            hook(*args, **options)
        bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in options.items() if k in kernel.arg_names})
        bound.apply_defaults()
        size = tuple(int(part) for part in (grid(dict(bound.arguments)) if callable(grid) else grid))
        given = {key: _values(value, place) for place, (key, value) in enumerate(bound.arguments.items())}

        def step() -> None:
            with _LOCK, _named(name):
                function = interpreter.InterpretedFunction(kernel.fn).rewrite()
                interpreter.GridExecutor(function, kernel.arg_names, size)(**given)

        try:
            step()
        except Exception as error:
            raise _refused(name, error) from error
        if TAPE.steps is not None:
            TAPE.steps.append(step)
        return _Compiled(name)

    return run


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    before, _RUNNING.kernel = _RUNNING.kernel, name
    try:
        yield
    finally:
        _RUNNING.kernel = before


def _part(real: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """``function(...)`` of a function under ``triton.jit``: inside a kernel it is a part of it, elsewhere a mistake."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not _RUNNING.kernel:
            return real(function, *args, **kwargs)
        scope = interpreter._patch_lang(function.fn)
        try:
            return interpreter.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)
        finally:
            scope.restore()

    return call


def _untimed(report: Report) -> Callable[..., Any]:
    def bench(*_: Any, **__: Any) -> list[float]:
        report(Kind.DEVICE, "triton.autotune")  # it waits for each run that it measures
        return [1.0, 1.0, 1.0]

    return bench


def _uncached(*given: Any) -> bool:
    """Nothing that was pretended goes to the cache on disk, nor comes from it."""
    given[-1]()  # the measuring
    return False


class _Driver:
    """What programs and Triton ask ``triton.runtime.driver.active``."""

    def __init__(self) -> None:
        properties = {
            "max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32,
            "sm_clock_rate": 1980000, "mem_clock_rate": 2619000, "mem_bus_width": 5120,
        }  # fmt: skip
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: dict(properties))

    def get_current_device(self) -> int:
        return backend.STATE.index

    def set_current_device(self, device: int) -> None:
        backend.use(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return torch.cuda.get_device_capability()

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return backend.visible()

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        return importlib.import_module("triton.testing").do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1, dtype=torch.int, device=backend.visible())

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()


def _put(undo: contextlib.ExitStack, report: Report) -> None:
    """Replace what launches kernels, until ``undo`` closes."""
    from headway.syncs.sim.interpreter import mended  # which needs numpy, as Triton's interpreter does

    jit, tuner, driver = (importlib.import_module(f"triton.runtime.{name}") for name in ("jit", "autotuner", "driver"))
    interpreter = mended(undo)
    run = _launch(interpreter)
    names: list[tuple[Any, str, Any]] = [
        (jit.JITFunction, "run", run),
        (jit.JITFunction, "__call__", _part(jit.JITFunction.__call__, interpreter)),
        (interpreter.InterpretedFunction, "run", run),
        (tuner.Autotuner, "_bench", _untimed(report)),
        (tuner.Autotuner, "check_disk_cache", _uncached),
        (driver.driver, "_active", _Driver()),
    ]
    for owner, name, value in names:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


class _Finder:
    """Notices that the program imports Triton."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "triton":
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or found.loader is None:
            return found
        loader: Any = found.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._then()

        loader.exec_module = exec_module
        return found


@contextlib.contextmanager
def served(report: Report) -> Iterator[None]:
    """Launches are the interpreter's, process-wide: at once if Triton is imported, else when it is."""
    with contextlib.ExitStack() as undo:
        if "triton" in sys.modules:
            _put(undo, report)
        else:
            finder: Any = _Finder(lambda: _put(undo, report))
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
        yield
