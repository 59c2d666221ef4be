"""``gated_delta`` on CPUs: short rows by the reference, longer ones in chunks, by products and triangular
solves.

Within a chunk whose first state is h, with G the running sum of g: (I + A) U = beta (V - exp(G) K h), where A is
strictly lower triangular, A_ij = beta_i (exp(G_i - G_j) k_i . k_j). Then O = scale (exp(G) Q h + tril(exp(G_i - G_j)
q_i . k_j) U), and the next h = exp(G_l) h + (exp(G_l - G) K)^T U. Where decays are by channel, exp(G_i - G_j) belongs inside
the sum over channels: see ``near``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.core.ints import next_power_of_2
from headway.kernels.gated_delta import reference
from headway.kernels.gated_delta.reference import log_decay, unit
from headway.kernels.state_parts import OwnReplay, available, parts_of
from headway.kernels.state_rows import replay_of

__all__ = ["available", "gated_delta"]
CHUNK = 64


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
    o = torch.zeros(v.shape, dtype=v.dtype)
    for part in parts_of(query_start, row_slots, seq_lens, len(state), short):
        at, own = part.tokens, state[part.slots]
        if part.longest <= short:
            rings = OwnReplay(part, replay)
            o[at] = reference.scan(
                q[at], k[at], v[at], a[at], a_log, dt_bias, b[at], beta_scale, scale, own,
                part.query_start, part.row_slots, part.seq_lens, part.longest, rings.own,
            )  # fmt: skip
            rings.write_back()
        else:
            h = torch.zeros(own.shape[1:]) if part.fresh else own[0].float()
            share = v.shape[1] // k.shape[1]
            heads_first = [
                each.transpose(0, 1)
                for each in (
                    unit(q[at]).repeat_interleave(share, 1),
                    unit(k[at]).repeat_interleave(share, 1),
                    v[at].float(),
                    log_decay(a[at], a_log, dt_bias),
                    beta_scale * torch.sigmoid(b[at].float())[..., None],
                )
            ]
            found, own[0] = _long(heads_first, scale, h)
            o[at] = found.transpose(0, 1).to(v.dtype)
        state[part.slots] = own
    return o


def _long(inputs: list[torch.Tensor], scale: float, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: q, k [H, L, K], v [H, L, V], log decays [H, L, 1 or K], beta [H, L, 1]; h [H, K, V] -> o [H, L, V],
    next h."""
    whole, length = inputs[3].shape[-1] == 1, inputs[0].shape[1]
    if not whole:  # the last chunk is filled up with tokens that neither decay nor add
        last = length % CHUNK
        inputs = [F.pad(each, (0, 0, 0, next_power_of_2(last) - last if last else 0)) for each in inputs]
    found = []
    for q, k, v, g, beta in zip(*(each.split(CHUNK, 1) for each in inputs), strict=True):
        total = g.cumsum(1)
        if whole:
            causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
            apart = torch.where(causal, (total - total.mT), -torch.inf).exp()  # [H, l, l]
            keys, scores = (torch.einsum("hik,hjk->hij", each, k) * apart for each in (k, q))
        else:
            keys, scores = near(torch.stack([k, q]), k, g)
        right = beta * (v - (total.exp() * k) @ h)
        u = torch.linalg.solve_triangular((beta * keys).tril(-1), right, upper=False, unitriangular=True)
        found.append(scale * ((total.exp() * q) @ h + scores @ u))
        left = behind(g).exp() * k
        h = total[:, -1].exp()[..., None] * h + left.transpose(1, 2) @ u
    return torch.cat(found, 1)[:, :length], h


def near(rows: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """tril(sum over channels of x_i k_j exp(g_j+1 + ... + g_i)) [..., H, l, l] of each x of ``rows`` [..., H, l, K]; k and log
    decays g are [H, l, K], l a power of two.

    exp(-g) of strong decays overflows. So what lies across the middle is a product of decays from j to there and from there
    to i, both at most 1; and both halves are done likewise.
    """
    length = k.shape[1]
    if length == 1:
        return (rows * k).sum(-1, keepdim=True)
    rows, k, g = (each.unflatten(-2, (2, length // 2)) for each in (rows, k, g))
    left = behind(g[:, 0]).exp() * k[:, 0]
    across = rows[..., 1, :, :] * g[:, 1].cumsum(1).exp() @ left.mT  # [..., H, l/2, l/2]
    inside = near(rows.flatten(-4, -3), k.flatten(0, 1), g.flatten(0, 1)).unflatten(-3, (-1, 2))
    upper = torch.cat([inside[..., 0, :, :], torch.zeros_like(across)], -1)
    return torch.cat([upper, torch.cat([across, inside[..., 1, :, :]], -1)], -2)


def behind(g: torch.Tensor) -> torch.Tensor:
    """[H, l, ...], the sum of g over the tokens behind each: no difference, in which strong decays would hide weak ones."""
    return F.pad(g[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
