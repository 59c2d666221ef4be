"""What begins before torch is imported: only where there is a GPU's driver, and nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.engine import early


class NoCompiler:
    """Stands for the compiler's process."""

    made = 0
    closed = 0

    def __init__(self) -> None:
        NoCompiler.made += 1

    def close(self) -> None:
        NoCompiler.closed += 1


class FakeDriver:
    """Counts contexts of device 1."""

    def __init__(self, status: int = 0) -> None:
        self._status, self.calls = status, list[str]()
        self.opened = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDevicePrimaryCtxRetain":
                self.opened.set()
            if name == "cuDeviceGet":
                assert arguments[1] == 1
            return self._status

        return call


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> type[NoCompiler]:
    NoCompiler.made = NoCompiler.closed = 0
    monkeypatch.setattr(early, "CompilerProcess", NoCompiler)
    return NoCompiler


def test_nothing_begins_without_a_gpu(compiler: type[NoCompiler], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert early._begin(EngineArgs(model="m")) is None and compiler.made == 0


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
def test_nothing_begins_where_no_gpu_is_wanted(
    compiler: type[NoCompiler], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    assert early._begin(EngineArgs(model="m", device=device)) is None and compiler.made == 0


def test_the_context_of_the_wanted_gpu_is_made(compiler: type[NoCompiler], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    early._begin(EngineArgs(model="m", device="cuda:1"))
    assert driver.opened.wait(10)
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_a_driver_that_fails_is_left_to_torch() -> None:
    driver = FakeDriver(status=100)
    early._open_context(driver, 1)  # type: ignore[arg-type]
    assert driver.calls == ["cuInit"]


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_as_before_afterwards(enabled: bool) -> None:
    before = gc.isenabled()
    gc.unfreeze()  # what servers of other tests in this process set aside
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), early._no_collections() as set_aside:
            assert not gc.isenabled()
            set_aside()
            assert gc.get_freeze_count() > 0
            made = [[number] for number in range(1000)]
            raise KeyError
        young = gc.get_objects(generation=0)
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
        assert not any(each is made for each in young)
    finally:
        (gc.enable if before else gc.disable)()


def test_an_engine_that_cannot_be_built_leaves_no_compiler(
    compiler: type[NoCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    with pytest.raises(ConfigError, match="sees no CUDA GPU"):
        early.build_engine(EngineArgs(model="m", device="cuda:1"))
    assert compiler.closed == compiler.made
