"""``selective_scan`` on CPUs: the reference, on the states of the step's rows alone."""

from __future__ import annotations

import torch

from headway.kernels.selective_scan import reference
from headway.kernels.state_parts import OwnReplay, available, parts_of
from headway.kernels.state_rows import replay_of

__all__ = ["available", "selective_scan"]


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor | None,
    state: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    max_query_len: int,
    short: int,
    inputs: torch.Tensor | None = None,
    stored_at: torch.Tensor | None = None,
    store_at: torch.Tensor | None = None,
) -> torch.Tensor:
    replay = replay_of(inputs, stored_at, store_at)
    y = torch.zeros_like(x)
    for part in parts_of(query_start, row_slots, seq_lens, len(state), short):
        own = state[part.slots]
        at = part.tokens
        gate = None if z is None else z[at]
        rings = OwnReplay(part, replay)
        y[at] = reference.scan(
            x[at], dt[at], dt_bias, a, b[at], c[at], d, gate, own,
            part.query_start, part.row_slots, part.seq_lens, part.longest, rings.own,
        )  # fmt: skip
        rings.write_back()
        state[part.slots] = own
    return y
