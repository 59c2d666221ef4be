"""What ``causal_conv`` means, in torch; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.state_rows import Rows, owners, rows_of


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
    length, taps = ring.shape[1], weight.shape[1]
    rows = rows_of(query_start, row_slots, seq_lens, len(ring))
    row, place, real = owners(rows, len(x))
    slot, position = rows.slots[row], rows.starts[row] + place
    token = torch.arange(len(x), device=x.device)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for back in range(taps):
        past = torch.where((position >= back)[:, None], ring[slot, (position - back) % length], 0)
        value = torch.where((place >= back)[:, None], x[(token - back).clamp(min=0)], past)
        y += value.float() * weight[:, taps - 1 - back].float()
    if bias is not None:
        y += bias.float()
    if silu:
        y = F.silu(y)
    _store(ring, x, rows, length)
    return torch.where(real[:, None], y, 0).to(x.dtype)


def _store(ring: torch.Tensor, x: torch.Tensor, rows: Rows, length: int) -> None:
    """Write each live row's last inputs: the one at position p to place p % M."""
    last = (rows.starts + rows.lens - 1)[:, None]
    position = last - (last - torch.arange(length, device=x.device)) % length  # [R, M] the last one that lies there
    written = rows.live[:, None] & (position >= rows.starts[:, None])
    token = (rows.first[:, None] + position - rows.starts[:, None]).clamp(0, len(x) - 1)
    mine = rows.live & (rows.slots == torch.arange(len(ring), device=x.device)[:, None])  # [S, R]
    row = mine.int().argmax(1)
    new = mine.any(1)[:, None] & written[row]  # [S, M]
    ring.copy_(torch.where(new[..., None], x[token[row]].to(ring.dtype), ring))
