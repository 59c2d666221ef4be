"""What ``selective_scan`` means, in torch, token by token. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.state_rows import Replay, in_line, replay_of, rows_of, side_by_side, walk


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
    return scan(x, dt, dt_bias, a, b, c, d, z, state, query_start, row_slots, seq_lens, max_query_len, replay)


def scan(
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
    longest: int,
    replay: Replay | None,
) -> torch.Tensor:
    """The same, told how many tokens rows have and run again at most."""
    rows, sizes = rows_of(query_start, row_slots, seq_lens, len(state)), (*x.shape[1:], *x.shape[1:], *b.shape[1:])
    xs, dts, bs, cs = (side_by_side(each, rows, longest).float() for each in (x, dt, b, c))

    def again(h: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        xi, dti, bi = given.split(sizes, 1)
        s = F.softplus(dti + dt_bias.float())[..., None]
        return torch.exp(s * a) * h + s * bi[:, None] * xi[..., None]

    def token(i: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = torch.cat((xs[:, i], dts[:, i], bs[:, i]), 1)
        new = again(h, given)
        return new, (new * cs[:, i, None]).sum(-1), given

    found = walk(state, rows, longest, token, again, replay)
    y = in_line(found, rows, len(x)) + d.float() * x.float()
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)
