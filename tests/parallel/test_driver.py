"""``Driver`` calls the CUDA driver as its header says, where there is no GPU, too."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from headway.kernels.peer_reduce import FILL
from headway.parallel.peer_buffers import Driver


class Card:
    """The driver's functions in the order of arguments that CUDA's header gives; it remembers like one."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self.opened: list[int] = []
        self.status = 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:  # noqa: N802
        address._obj.value = 2**40 + len(self.memory)
        self.memory[address._obj.value] = torch.zeros(size.value // 2, dtype=torch.int16)
        return self.status

    def cuMemsetD16_v2(self, address: Any, value: Any, count: Any) -> int:  # noqa: N802
        self.memory[address.value][: count.value] = value.value - (value.value >> 15 << 16)
        return self.status

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        return self.status

    def cuMemFree_v2(self, address: Any) -> int:  # noqa: N802
        del self.memory[address.value]
        return self.status

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:  # noqa: N802
        handle._obj.bytes[:] = [0xFF, *address.value.to_bytes(8, "little"), *[0] * 54, 0xEE]
        return self.status

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        told = bytes(handle.bytes)
        assert (told[0], told[63], flags.value) == (0xFF, 0xEE, 1)
        address._obj.value = int.from_bytes(told[1:9], "little") + 2**50
        self.opened.append(address._obj.value)
        return self.status

    def cuIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        self.opened.remove(address.value)
        return self.status

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: Any, source: Any, target: Any) -> int:  # noqa: N802
        """Whether a card can be reached, attribute 2, is true one way only here."""
        value._obj.value = {(2, 0, 1): 1}.get((attribute.value, source.value, target.value), 0)
        return self.status


def test_the_driver_is_asked_as_its_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": card}[name])
    driver = Driver()
    address = driver.allocate(4096)
    assert card.memory[address].tolist() == [FILL] * 2048
    handle = driver.handle(address)
    assert len(handle) == 64
    theirs = driver.open(handle)
    assert theirs == address + 2**50 and card.opened == [theirs]
    driver.close(theirs)
    driver.free(address)
    assert not card.opened and not card.memory
    assert driver.reaches(0, 1) and not driver.reaches(1, 0)
    card.status = 201
    with pytest.raises(OSError, match="cuDeviceGetP2PAttribute gives CUDA error 201"):
        driver.reaches(0, 1)
    with pytest.raises(OSError, match="cuMemAlloc_v2 gives CUDA error 201"):
        driver.allocate(64)
