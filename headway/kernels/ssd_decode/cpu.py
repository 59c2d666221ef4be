"""``ssd_decode`` on CPUs: the CPU forms of its two operations."""

from __future__ import annotations

import torch

from headway.kernels.causal_conv.cpu import causal_conv
from headway.kernels.ssd_decode.reference import composed
from headway.kernels.ssd_scan.cpu import ssd_scan
from headway.kernels.state_parts import available

__all__ = ["available", "ssd_decode"]


def ssd_decode(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ring: torch.Tensor, dt: torch.Tensor,
    dt_bias: torch.Tensor, a: torch.Tensor, d: torch.Tensor, dt_min: float, dt_max: float, state: torch.Tensor,
    query_start: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, packed: torch.Tensor,
    max_chunks: int, max_query_len: int, short: int, inputs: torch.Tensor | None = None,
    stored_at: torch.Tensor | None = None, store_at: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    rows = (query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short)
    of_scan, replay = (dt, dt_bias, a, d, dt_min, dt_max, state), (inputs, stored_at, store_at)
    return composed(causal_conv, ssd_scan, x, (weight, bias, ring), of_scan, rows, replay)
