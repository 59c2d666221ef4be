"""cupti-python without CUPTI: callbacks as its releases make them, on calls that a test pretends."""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from typing import Any

import pytest
import torch

from headway.syncs.cupti_api import _CallData

Cbid = enum.IntEnum("Cbid", {"cudaStreamSynchronize_v3020": 1, "cudaLaunchKernel_v7000": 2})


class Site(enum.IntEnum):
    API_ENTER = 0
    API_EXIT = 1


class CopyCall(ctypes.Structure):
    """The parameters of cudaMemcpyAsync."""

    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    )


class CallbackData:
    """A callback's data as 13.0 gives it: no parameters, but the place of CUPTI's struct."""

    def __init__(self, site: Site, name: str, params: int) -> None:
        self._raw = _CallData(int(site), name.encode(), params, None, b"", None, 1, None, 99)
        self.callback_site, self.function_name, self.correlation_id = int(site), name, 99
        self.ptr = ctypes.addressof(self._raw)


class FakeCupti(types.ModuleType):
    """Calls back for call(); ``busy`` refuses, ``silent`` never calls back, ``old`` is 13.0, else 13.4."""

    def __init__(self, busy: bool = False, silent: bool = False, old: bool = False) -> None:
        super().__init__("cupti.cupti")
        self.busy, self.silent, self.old = busy, silent, old
        self.callback: Any = None
        self.enabled: list[int] = []
        self.domains: list[int] = []
        self.CallbackDomain = types.SimpleNamespace(RUNTIME_API=2, DRIVER_API=1)
        self.ApiCallbackSite = Site
        if old:
            self.runtime_api_trace_cbid, self.driver_api_trace_cbid = Cbid, ()
        else:
            self.RuntimeApiTraceCbid, self.DriverApiTraceCbid = Cbid, ()

    def subscribe(self, callback: Any, userdata: Any) -> int:
        if self.busy:
            raise RuntimeError("MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        self.callback = callback
        return 7

    def unsubscribe(self, subscriber: int) -> None:
        self.callback = None

    def enable_callback(self, on: int, subscriber: int, domain: int, cbid: int) -> None:
        self.enabled.append(cbid)

    def enable_domain(self, on: int, subscriber: int, domain: int) -> None:
        self.domains.append(domain)

    def call(self, *names: str, copy: CopyCall | None = None) -> None:
        """Nested calls; ``copy`` are the parameters of the outermost."""
        if self.callback is None or self.silent or not names:
            return
        address = 0 if copy is None else ctypes.addressof(copy)
        for site in (Site.API_ENTER, Site.API_EXIT):
            data: Any = CallbackData(site, names[0], address)
            if not self.old:
                data = types.SimpleNamespace(
                    callback_site=site, correlation_id=99, function_name=names[0], function_params=address
                )
            self.callback(None, 2, 1, data)
            if site is Site.API_ENTER:
                self.call(*names[1:])


class FakeDriver:
    """libcuda: addresses below 1000 are memory that it knows."""

    def cuPointerGetAttribute(self, kind: Any, attribute: Any, pointer: Any) -> int:  # noqa: N802 - CUDA's name
        return 0 if pointer.value < 1000 else 1


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeCupti) -> FakeCupti:
    """Make it this process's cupti-python, beside a torch that sees a GPU."""
    monkeypatch.setitem(sys.modules, "cupti", types.ModuleType("cupti"))
    monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeDriver())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.call("cudaDeviceSynchronize"))
    return fake
