"""Begins what a start needs before torch is imported, which takes two seconds: the compiler's process, and CUDA's context."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.core.config import EngineArgs
from headway.core.log import logger
from headway.core.seat import Seat
from headway.kernels.compiler_process import CompilerProcess

if TYPE_CHECKING:
    from headway.engine.core import EngineCore


def build_engine(args: EngineArgs, seat: Seat | None = None) -> EngineCore:
    """``boot.build_engine``, sooner."""
    start, compiler = time.perf_counter(), _begin(args)
    try:
        with _no_collections() as set_aside:
            from headway.engine.boot import build_engine

            set_aside()
            logger.info("imports took %.1f s", time.perf_counter() - start)
            return build_engine(args, compiler=compiler, seat=seat)
    finally:
        if compiler is not None:
            compiler.close()


def _begin(args: EngineArgs) -> CompilerProcess | None:
    """Begin what a GPU needs; nothing where there is no driver of one, or where it is not wanted."""
    kind, _, number = args.device.partition(":")
    if kind not in ("auto", "cuda"):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    threading.Thread(target=_open_context, args=(driver, int(number or 0)), name="headway-cuda", daemon=True).start()
    return CompilerProcess() if importlib.util.find_spec("triton") else None


def _open_context(driver: ctypes.CDLL, number: int) -> None:
    """Make the context that torch will use; should it fail, torch will fail too, and say why."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), number) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


@contextmanager
def _no_collections() -> Iterator[Callable[[], None]]:
    """Inside, Python collects no garbage: hundreds of thousands of objects are made that stay, and to look at them takes a
    third of a second. They count as old afterwards.

    Calling what this gives sets aside the objects there are until the end, so that ``gc.collect`` need not look at them either.
    """
    wanted, mine = gc.isenabled(), gc.get_freeze_count() == 0

    def set_aside() -> None:
        if mine:
            gc.freeze()

    gc.disable()
    try:
        yield set_aside
    finally:
        set_aside()
        if mine:
            gc.unfreeze()
        if wanted:
            gc.enable()
