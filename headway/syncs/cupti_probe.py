"""The driver-boundary probe: CUPTI callbacks around every blocking CUDA call, whoever makes it.

Needs the extra ``headway[cupti]`` (cupti-python). CUPTI calls back on the calling thread before and after the call, so
waits inside C++ extensions, Triton launchers and NCCL are seen, timed, judged by that thread's regions, and attributed to
the Python line below. CUPTI takes one subscriber per process: with torch.profiler running it is busy, and attach() says so.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Final

from headway.syncs.calls import CALLS
from headway.syncs.cupti_api import Subscription, parameters
from headway.syncs.driver import ASYNC_COPIES, blocking, names, plain
from headway.syncs.errors import ProbeError, SyncError
from headway.syncs.findings import Kind, Wait
from headway.syncs.frames import locate
from headway.syncs.probes import Counted, Sink
from headway.syncs.regions import judge, wanted

CU_POINTER_ATTRIBUTE_MEMORY_TYPE: Final = 2


class _CopyArguments(ctypes.Structure):
    """cudaMemcpyAsync's, as CUPTI hands them over; cuMemcpy*Async begin the same way."""

    _fields_ = (("destination", ctypes.c_void_p), ("source", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[int, int]] = []  # correlation id, start


class CuptiProbe:
    """See the module. One instance per process is enough; attach() is counted."""

    name = "cupti"
    watches = "every blocking CUDA runtime and driver call, at the driver boundary (cupti-python)"

    def __init__(self) -> None:
        self._thread = _Thread()
        self._shared = Counted(self._subscribe, self._unsubscribe)
        self._subscription: Subscription | None = None
        self._driver: Any = None
        self.calls_seen = 0

    def attach(self, sink: Sink) -> None:
        """Subscribe, and check with one deliberate wait that callbacks arrive.

        Raises:
            ProbeError: no cupti-python, no CUDA, CUPTI is taken, or callbacks do not arrive.
        """
        del sink  # the judge: driver callbacks come on any thread
        self._shared.__enter__()

    def detach(self) -> None:
        """Undo one attach()."""
        self._shared.__exit__()

    def _subscribe(self) -> None:
        import torch

        self._subscription = Subscription(self._callback, names())
        try:
            try:
                self._driver = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise ProbeError(f"the driver's library cannot be asked about pointers: {error}") from error
            before = self.calls_seen
            torch.cuda.synchronize()
            if self.calls_seen == before:
                raise ProbeError("CUPTI accepted the subscription, but a deliberate wait caused no callback")
        except BaseException:
            self._unsubscribe()
            raise

    def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _callback(self, userdata: Any, domain: int, callback_id: int, data: Any) -> None:
        """CUPTI's, on the calling thread. Nothing may escape from here into the driver."""
        subscription = self._subscription
        if subscription is None:
            return
        if subscription.entering(data):
            self._thread.open.append((data.correlation_id, time.perf_counter_ns()))
            return
        self.calls_seen += 1
        if not self._thread.open:
            return  # the subscription began inside this call
        _, begin = self._thread.open.pop()
        if self._thread.open or not wanted():
            return  # the runtime's own driver call inside a runtime call
        kind = blocking(data.function_name)
        if kind is None:
            if plain(data.function_name) not in ASYNC_COPIES or not self._pageable(parameters(data)):
                return
            kind = Kind.PAGEABLE
        self._account(kind, data.function_name, begin)

    def _account(self, kind: Kind, name: str, begin: int) -> None:
        micros = (time.perf_counter_ns() - begin) / 1000
        call = CALLS.outermost
        if call is not None:  # the live probe reports it, under the torch call's name
            call.hear()
            call.driver_micros = (call.driver_micros or 0.0) + micros
            return
        site, stack = locate()
        thread = threading.current_thread().name
        try:
            judge(Wait(site, kind, plain(name), micros, begin, thread, self.name, None, stack))
        except SyncError as error:  # must not cross the driver
            CALLS.pending = error

    def _pageable(self, address: int) -> bool:
        """Whether either end of an asynchronous copy is memory the driver does not know."""
        if not address:
            return False
        arguments = _CopyArguments.from_address(address)
        return any(self._unknown(pointer) for pointer in (arguments.destination, arguments.source) if pointer)

    def _unknown(self, pointer: int) -> bool:
        kind = ctypes.c_uint(0)
        attribute = ctypes.c_int(CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        status = self._driver.cuPointerGetAttribute(ctypes.byref(kind), attribute, ctypes.c_void_p(pointer))
        return bool(status != 0)
