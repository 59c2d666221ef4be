"""``causal_conv`` on CPUs: the reference, on the windows of the step's rows alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.causal_conv import reference
from headway.kernels.state_parts import available, parts_of

__all__ = ["available", "causal_conv"]


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ring: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    max_query_len: int,
    short: int,
    silu: bool,
) -> torch.Tensor:
    y = torch.zeros_like(x)
    for part in parts_of(query_start, row_slots, seq_lens, len(ring), short):
        mine, own = x[part.tokens], ring[part.slots]
        if part.longest <= short:
            y[part.tokens] = reference.causal_conv(
                mine,
                weight,
                bias,
                own,
                part.query_start,
                part.row_slots,
                part.seq_lens,
                packed,
                0,
                part.longest,
                short,
                silu,
            )
        else:
            y[part.tokens] = _long(mine, weight, bias, own[0], int(part.seq_lens) - part.longest, silu)
        ring[part.slots] = own
    return y


def _long(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ring: torch.Tensor, start: int, silu: bool
) -> torch.Tensor:
    """One row whose tokens [L, C] begin at position ``start``; its ring [M, C] is written."""
    length, taps = len(ring), weight.shape[1]
    positions = torch.arange(start - taps + 1, start)
    past = torch.where((positions >= 0)[:, None], ring[positions % length], 0)
    inputs = torch.cat([past, x]).float().T[None]
    y = F.conv1d(inputs, weight.float()[:, None], None if bias is None else bias.float(), groups=x.shape[1])[0].T
    last = x[-length:]
    ring[torch.arange(start + len(x) - len(last), start + len(x)) % length] = last
    return (F.silu(y) if silu else y).to(x.dtype)
