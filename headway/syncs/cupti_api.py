"""CUPTI's callback interface through cupti-python, whichever of its releases is installed.

Releases differ: 13.0 calls its tables of ids ``runtime_api_trace_cbid`` and hides a call's parameters, 13.4 has
``RuntimeApiTraceCbid`` and ``function_params``. What is missing is read from CUPTI's own struct, whose place both give.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from headway.syncs.driver import plain
from headway.syncs.errors import ProbeError

Callback = Callable[[Any, int, int, Any], None]
"""(user data, domain, callback id, call data), on the thread that calls CUDA; nothing may escape from it."""


class _CallData(ctypes.Structure):
    """CUpti_CallbackData of cupti_callbacks.h (CUDA 13)."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("function_name", ctypes.c_char_p),
        ("function_params", ctypes.c_void_p),
        ("function_return_value", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("context_uid", ctypes.c_uint32),
        ("correlation_data", ctypes.c_void_p),
        ("correlation_id", ctypes.c_uint32),
    )


def parameters(data: Any) -> int:
    """Address of the parameters of the call that a callback reports; 0 where it is not known."""
    address = getattr(data, "function_params", None)
    if address is not None:
        return int(address)
    place = getattr(data, "ptr", 0)
    if not place:
        return 0
    raw = _CallData.from_address(int(place))
    # A struct of another shape would give another number here.
    return int(raw.function_params or 0) if raw.correlation_id == data.correlation_id else 0


class Subscription:
    """The one subscriber that CUPTI allows a process, while it is open.

    Args:
        names: functions to report, without version suffixes; None: all of the runtime and driver API.

    Raises:
        ProbeError: no cupti-python, no CUDA, CUPTI is taken, or it knows none of the names.
    """

    def __init__(self, callback: Callback, names: Iterable[str] | None) -> None:
        try:
            self._cupti: Any = importlib.import_module("cupti.cupti")
        except (ImportError, OSError) as error:
            raise ProbeError(
                f"CUPTI is not available: {error} (pip install 'headway[cupti]' on a CUDA machine)"
            ) from error
        import torch

        if not torch.cuda.is_available():
            raise ProbeError("CUPTI has nothing to watch: torch sees no CUDA device")
        self._enter = self._cupti.ApiCallbackSite.API_ENTER
        try:
            self._subscriber = self._cupti.subscribe(callback, None)
        except Exception as error:
            raise ProbeError(
                f"CUPTI is busy or refuses ({error}): one subscriber per process; end other profilers"
            ) from error
        try:
            if names is None:
                self._enable_all()
            else:
                self._enable(set(names))
        except BaseException:
            self.close()
            raise

    def entering(self, data: Any) -> bool:
        """Whether a callback comes before its call, not after."""
        return bool(data.callback_site == self._enter)

    def close(self) -> None:
        """Let CUPTI go."""
        if self._subscriber:
            self._cupti.unsubscribe(self._subscriber)
            self._subscriber = 0

    def _domains(self) -> tuple[tuple[Any, Any], ...]:
        domain = self._cupti.CallbackDomain
        return (
            (domain.RUNTIME_API, self._table("RuntimeApiTraceCbid", "runtime_api_trace_cbid")),
            (domain.DRIVER_API, self._table("DriverApiTraceCbid", "driver_api_trace_cbid")),
        )

    def _table(self, *spellings: str) -> Any:
        for name in spellings:
            if hasattr(self._cupti, name):
                return getattr(self._cupti, name)
        raise ProbeError(f"this cupti-python has no {spellings[0]}: it is a release Headway does not know")

    def _enable(self, names: set[str]) -> None:
        enabled = 0
        for domain, table in self._domains():
            for identifier in table:
                if plain(identifier.name) in names:
                    with contextlib.suppress(Exception):  # ids of a newer CUDA than this driver's
                        self._cupti.enable_callback(1, self._subscriber, int(domain), int(identifier))
                        enabled += 1
        if not enabled:
            raise ProbeError(
                "CUPTI knows none of the blocking calls by name: cupti-python and CUDA do not fit together"
            )

    def _enable_all(self) -> None:
        for domain, _ in self._domains():
            self._cupti.enable_domain(1, self._subscriber, int(domain))
