"""``gated_delta`` on CPUs: short rows by the reference, longer ones in chunks, by products and triangular
solves.

Within a chunk whose first state is h, with G the running sum of g: (I + A) U = beta (V - exp(G) K h), where A is
strictly lower triangular, A_ij = beta_i (exp(G_i - G_j) k_i . k_j). Then O = scale (exp(G) Q h + tril(exp(G_i - G_j)
q_i . k_j) U), and the next h = exp(G_l) h + (exp(G_l - G) K)^T U.
"""

from __future__ import annotations

import torch

from headway.kernels.gated_delta import reference
from headway.kernels.gated_delta.reference import log_decay, unit
from headway.kernels.state_parts import OwnReplay, available, parts_of
from headway.kernels.state_rows import replay_of

__all__ = ["available", "gated_delta"]
CHUNK, CHUNK_OF_CHANNELS = 64, 32


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
    whole = inputs[3].shape[-1] == 1
    found = []
    for q, k, v, g, beta in zip(
        *(each.split(CHUNK if whole else CHUNK_OF_CHANNELS, 1) for each in inputs), strict=True
    ):
        total = g.cumsum(1)
        causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        apart = torch.where(
            causal[..., None], total[:, :, None] - total[:, None], -torch.inf
        ).exp()  # [H, l, l, 1 or K]
        if whole:
            keys, scores = (torch.einsum("hik,hjk->hij", each, k) * apart[..., 0] for each in (k, q))
        else:
            keys, scores = (torch.einsum("hik,hjk,hijk->hij", each, k, apart) for each in (k, q))
        right = beta * (v - (total.exp() * k) @ h)
        u = torch.linalg.solve_triangular((beta * keys).tril(-1), right, upper=False, unitriangular=True)
        found.append(scale * ((total.exp() * q) @ h + scores @ u))
        left = (total[:, -1:] - total).exp() * k
        h = total[:, -1].exp()[..., None] * h + left.transpose(1, 2) @ u
    return torch.cat(found, 1), h
