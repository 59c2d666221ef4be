"""What ``copy_states`` means, in torch. Reads no device value on the host."""

from __future__ import annotations

import torch


def copy_states(storage: torch.Tensor, packed: torch.Tensor, header_at: int, max_copies: int) -> None:
    slots = len(storage)
    nth = torch.arange(max_copies, device=packed.device)
    at = (packed[header_at] + 2 * nth).clamp(0, len(packed) - 2)
    source, destination = packed.take(at).long(), packed.take(at + 1).long()
    real = (nth < packed[header_at + 1]) & (source >= 0) & (source < slots) & (destination >= 0)
    mine = real & (destination == torch.arange(slots, device=packed.device)[:, None])  # [S, max_copies]
    found = storage[source.clamp(0, slots - 1)[mine.int().argmax(1)]]
    storage.copy_(torch.where(mine.any(1)[:, None], found, storage))
