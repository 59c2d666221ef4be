"""What ``apply_edits`` means, in torch."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import masked_write_

MAX_EDIT = 1024


def apply_edits(arena: torch.Tensor, packed: torch.Tensor, max_edits: int) -> None:
    """See the package. Costs max_edits * 1024 elements whatever the edits are."""
    if max_edits == 0:
        return
    ints = packed.to(torch.int64)
    size = ints.shape[0]
    edit = torch.arange(max_edits, device=packed.device)
    at = ints[1] + 3 * edit  # [E]
    listed = (edit < ints[0]) & (at >= 0) & (at + 2 < size)
    triple = ints.take((at[:, None] + torch.arange(3, device=packed.device)).clamp(0, size - 1))  # [E, 3]
    dst, src, length = triple.unbind(1)
    legal = listed & (length >= 0) & (length <= MAX_EDIT) & (dst >= 0) & (src >= 0)
    legal &= (dst + length <= arena.shape[0]) & (src + length <= size)
    lane = torch.arange(MAX_EDIT, device=packed.device)
    mask = legal[:, None] & (lane < length[:, None])  # [E, 1024]
    values = packed.take((src[:, None] + lane).clamp(0, size - 1))
    masked_write_(arena, dst[:, None] + lane, values, mask)
