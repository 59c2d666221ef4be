"""What ``delta_decode`` means: its three parts, one after the other, each in the form that it has on the device."""

from __future__ import annotations

import torch

from headway.kernels.causal_conv import causal_conv
from headway.kernels.gated_delta import gated_delta
from headway.kernels.gated_rms_norm import gated_rms_norm


def delta_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    ring: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    beta_scale: float,
    scale: float,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    sigmoid: bool,
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
    step = query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short
    _, heads, size, width = state.shape
    keys = (x.shape[1] - heads * width) // 2
    q, k, v = causal_conv(x, weight, None, ring, *step, True).split((keys, keys, heads * width), dim=1)
    q, k, v = (each.unflatten(1, (-1, own)) for each, own in ((q, size), (k, size), (v, width)))
    o = gated_delta(q, k, v, a, a_log, dt_bias, b, beta_scale, scale, state, *step, inputs, stored_at, store_at)
    y: torch.Tensor = gated_rms_norm(o.flatten(1), gate, norm, eps, width, False, sigmoid)
    return y
