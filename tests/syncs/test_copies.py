"""Copies between host and device, told from their arguments: which block, wherever the word non_blocking stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.syncs.copies import suspicion
from headway.syncs.findings import Kind


class Owned:
    """Which tensors are the device's, and which are pinned."""

    def __init__(self, device: torch.Tensor, *pinned: torch.Tensor) -> None:
        self._device, self._pinned = device, pinned

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor is self._device

    def pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self._pinned)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(
    ("more", "given", "blocks"),
    [
        ((), {}, True),
        ((False,), {}, True),
        ((True,), {}, False),
        ((), {"non_blocking": True}, False),
        ((), {"non_blocking": False}, True),
        ((True,), {"non_blocking": False}, True),
    ],
)
def test_copies_into_a_tensor(up: bool, more: tuple[Any, ...], given: dict[str, Any], blocks: bool) -> None:
    device, host = torch.zeros(3), torch.zeros(3)
    source, target = (host, device) if up else (device, host)
    blocked = (Kind.UPLOAD if up else Kind.READ) if blocks else None
    arguments = (target, source, *more)
    assert suspicion("aten.copy_", arguments, given, target, Owned(device, host)) is blocked
    assert suspicion("aten.copy_", arguments, given, target, Owned(device)) is (blocked or Kind.PAGEABLE)
    same = Owned(torch.zeros(1))
    assert suspicion("aten.copy_", arguments, given, target, same) is None, "nothing crosses the bus"


@pytest.mark.parametrize(
    ("name", "more", "given", "blocks"),
    [
        ("to", ("cpu",), {}, True),
        ("to", ("cpu", True), {}, False),
        ("to", ("cpu", torch.float32, True), {}, False),
        ("to", ("cpu", torch.float32, False, True), {}, True),
        ("to", ("cpu",), {"non_blocking": True}, False),
        ("cpu", (), {}, True),
        ("cpu", (), {"non_blocking": True}, True),
    ],
)
def test_reads(name: str, more: tuple[Any, ...], given: dict[str, Any], blocks: bool) -> None:
    """``cpu`` always waits, whatever it is given; the first flag among the others is theirs."""
    device, host = torch.zeros(3), torch.zeros(3)
    found = suspicion(f"Tensor.{name}", (device, *more), given, host, Owned(device, host))
    assert found is (Kind.READ if blocks else None)
