"""What ``gated_delta`` means, in torch, token by token. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.state_rows import in_line, load_states, rows_of, side_by_side, store_states, within

EPS = 1e-6


def unit(x: torch.Tensor) -> torch.Tensor:
    """f32, each last dimension divided by its length."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def log_decay(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """f32 [T, H, 1] or [T, H, K], <= 0."""
    rate = a_log.float().exp()
    if a.dim() == 2:
        return (-rate * F.softplus(a.float() + dt_bias.float()))[..., None]
    return -rate[:, None] * F.softplus(a.float() + dt_bias.float())


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    beta_scale: float,
    scale: float,
    state: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    max_query_len: int,
) -> torch.Tensor:
    rows = rows_of(query_start, row_slots, seq_lens, len(state))
    inside = within(rows, max_query_len)[..., None, None, None]
    share = v.shape[1] // k.shape[1]
    qs, ks = (side_by_side(unit(each), rows, max_query_len).repeat_interleave(share, 2) for each in (q, k))
    vs = side_by_side(v, rows, max_query_len).float()
    decays = side_by_side(log_decay(a, a_log, dt_bias), rows, max_query_len).exp()
    betas = side_by_side(beta_scale * torch.sigmoid(b.float()), rows, max_query_len)
    h = load_states(state, rows)  # [R, H, K, V]
    outs = []
    for i in range(max_query_len):
        key = ks[:, i, :, :, None]
        new = decays[:, i, :, :, None] * h
        u = betas[:, i, :, None] * (vs[:, i] - (key * new).sum(-2))
        new = new + key * u[:, :, None]
        h = torch.where(inside[:, i], new, h)
        outs.append(scale * (qs[:, i, :, :, None] * h).sum(-2))
    store_states(state, rows, h)
    return in_line(torch.stack(outs, 1), rows, len(v)).to(v.dtype)
