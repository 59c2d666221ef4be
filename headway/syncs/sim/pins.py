"""Page-locked memory of the pretended device."""

from __future__ import annotations

import weakref
from typing import Final

import torch


class Pins:
    """Which CPU storages are page-locked: those of tensors made so, as long as anything holds them."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark ``tensor``'s storage."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address:
            self._held[address] = weakref.ref(storage, lambda _: self._held.pop(address, None))
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._held


PINS: Final = Pins()
