"""``copy_states`` on CPUs: the listed rows alone."""

from __future__ import annotations

import torch

from headway.kernels.state_parts import available

__all__ = ["available", "copy_states"]


def copy_states(storage: torch.Tensor, packed: torch.Tensor, header_at: int, max_copies: int) -> None:
    at, count = packed[header_at : header_at + 2].tolist()  # host: CPU tensors
    pairs = packed[at : at + 2 * min(count, max_copies)].view(-1, 2).tolist()  # host: CPU tensors
    for source, destination in pairs:
        if 0 <= source < len(storage) and 0 <= destination < len(storage):
            storage[destination] = storage[source]
