"""``cap_logits`` in torch."""

from __future__ import annotations

import torch


def cap_logits(logits: torch.Tensor, factor: float, cap: float) -> None:
    if not cap:
        logits *= factor
        return
    x = logits.float()
    if factor != 1.0:
        x.mul_(factor)
    logits.copy_(x.div_(cap).tanh_().mul_(cap))
