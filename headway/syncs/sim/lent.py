"""Values of device tensors that torch's C++ side has in its hands: a collective's future gives them back as they are.

gloo serves NCCL's groups on the values that the CPU holds. What reads a future, such as the reducer of
DistributedDataParallel, gets those values, and copies them back into gradients: from the device to the device.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves


class Lent:
    """Storages of values that collectives were given, while they live."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def note(self, values: Any) -> None:
        """The tensors in ``values`` are a device's."""
        self._storages = {place: storage for place, storage in self._storages.items() if not storage.expired()}
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._storages[storage.data_ptr()] = StorageWeakRef(storage)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that claims to be the host's is a device's."""
        if not self._storages or tensor.layout is not torch.strided:
            return False
        found = self._storages.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()


LENT: Final = Lent()
