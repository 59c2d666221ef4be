"""What ``gated_delta`` means, in torch, token by token. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.state_rows import Replay, in_line, replay_of, rows_of, side_by_side, walk

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
    short: int,
    inputs: torch.Tensor | None = None,
    stored_at: torch.Tensor | None = None,
    store_at: torch.Tensor | None = None,
) -> torch.Tensor:
    replay = replay_of(inputs, stored_at, store_at)
    return scan(
        q, k, v, a, a_log, dt_bias, b, beta_scale, scale, state, query_start, row_slots, seq_lens, max_query_len, replay
    )


def scan(
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
    longest: int,
    replay: Replay | None,
) -> torch.Tensor:
    """The same, told how many tokens rows have and run again at most."""
    rows = rows_of(query_start, row_slots, seq_lens, len(state))
    key_heads, (heads, width) = k.shape[1], v.shape[1:]
    share = heads // key_heads
    qs, ks, vs = (side_by_side(each, rows, longest) for each in (unit(q), unit(k), v.float()))
    qs = qs.repeat_interleave(share, 2)
    decays = side_by_side(log_decay(a, a_log, dt_bias), rows, longest)  # [R, longest, H, 1 or K]
    betas = side_by_side(beta_scale * torch.sigmoid(b.float()), rows, longest)

    def spread(key: torch.Tensor) -> torch.Tensor:
        return key.repeat_interleave(share, 1)[..., None]  # [R, H, K, 1]

    def again(h: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        key, u, decay = given.split((ks[0, 0].numel(), heads * width, decays[0, 0].numel()), 1)
        h = decay.view(-1, heads, decays.shape[-1], 1).exp() * h
        return h + spread(key.view(-1, key_heads, ks.shape[-1])) * u.view(-1, heads, 1, width)

    def token(i: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        new = decays[:, i, :, :, None].exp() * h
        u = betas[:, i, :, None] * (vs[:, i] - (spread(ks[:, i]) * new).sum(-2))
        new = new + spread(ks[:, i]) * u[:, :, None]
        given = torch.cat([each.flatten(1) for each in (ks[:, i], u, decays[:, i])], 1)
        return new, scale * (qs[:, i, :, :, None] * new).sum(-2), given

    return in_line(walk(state, rows, longest, token, again, replay), rows, len(v)).to(v.dtype)
