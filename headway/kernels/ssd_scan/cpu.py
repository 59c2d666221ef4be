"""``ssd_scan`` on CPUs: short rows by the reference, longer ones in chunks, by products of matrices."""

from __future__ import annotations

import torch

from headway.kernels.ssd_scan import reference
from headway.kernels.state_parts import OwnReplay, available, parts_of
from headway.kernels.state_rows import replay_of

__all__ = ["available", "ssd_scan"]
CHUNK = 64


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_min: float,
    dt_max: float,
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
    y = torch.zeros(x.shape, dtype=x.dtype)
    for part in parts_of(query_start, row_slots, seq_lens, len(state), short):
        at, own = part.tokens, state[part.slots]
        steps = None if dt is None else dt[at]
        if part.longest <= short:
            rings = OwnReplay(part, replay)
            y[at] = reference.scan(
                x[at], steps, dt_bias, a, b[at], c[at], d, dt_min, dt_max, own,
                part.query_start, part.row_slots, part.seq_lens, part.longest, rings.own,
            )  # fmt: skip
            rings.write_back()
        else:
            s = reference.time_steps(x[at], steps, dt_bias, dt_min, dt_max)
            h = torch.zeros(own.shape[1:]) if part.fresh else own[0].float()
            found, own[0] = _long(x[at].float(), s, a, b[at].float(), c[at].float(), h)
            y[at] = (found if d is None else found + d.float()[:, None] * x[at].float()).to(x.dtype)
        state[part.slots] = own
    return y


def _long(
    x: torch.Tensor, s: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: x [L, H, P], s [L, H], b and c [L, G, N], h [H, P, N] -> y [L, H, P], the state behind it."""
    heads, groups = x.shape[1], b.shape[1]
    b, c = (each.repeat_interleave(heads // groups, 1) for each in (b, c))
    found = []
    for xs, ss, bs, cs in zip(*(each.split(CHUNK) for each in (x, s, b, c)), strict=True):
        total = (ss * a).cumsum(0).T  # [H, l]
        causal = torch.ones(len(xs), len(xs), dtype=torch.bool).tril()
        decay = torch.where(causal, total[:, :, None] - total[:, None], -torch.inf).exp()  # [H, l, l]
        scores = torch.einsum("ihn,jhn->hij", cs, bs) * decay * ss.T[:, None]
        y = torch.einsum("hij,jhp->ihp", scores, xs)
        found.append(y + torch.einsum("ihn,hpn,hi->ihp", cs, h, total.exp()))
        left = (total[:, -1:] - total).exp() * ss.T  # [H, l]
        h = total[:, -1].exp()[:, None, None] * h + torch.einsum("jhp,jhn,hj->hpn", xs, bs, left)
    return torch.cat(found), h
