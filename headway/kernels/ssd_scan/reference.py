"""What ``ssd_scan`` means, in torch, token by token. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.state_rows import Replay, in_line, replay_of, rows_of, side_by_side, walk


def time_steps(
    x: torch.Tensor, dt: torch.Tensor | None, dt_bias: torch.Tensor | None, dt_min: float, dt_max: float
) -> torch.Tensor:
    """f32 [T, H], of x [T, H, P] and dt [T, H]."""
    if dt is None:
        return torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
    raw = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    return F.softplus(raw).clamp(dt_min, dt_max)


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
    return scan(
        x, dt, dt_bias, a, b, c, d, dt_min, dt_max, state, query_start, row_slots, seq_lens, max_query_len, replay
    )


def scan(
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
    longest: int,
    replay: Replay | None,
) -> torch.Tensor:
    """The same, told how many tokens rows have and run again at most."""
    rows = rows_of(query_start, row_slots, seq_lens, len(state))
    (heads, width), (groups, size) = x.shape[1:], b.shape[1:]
    xs, bs, cs = (side_by_side(each, rows, longest).float() for each in (x, b, c))
    cs = cs.repeat_interleave(heads // groups, 2)
    dts = xs[..., :0, 0] if dt is None else side_by_side(dt, rows, longest).float()  # [R, longest, H or 0]

    def again(h: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        xi, bi, dti = given.split((heads * width, groups * size, dts.shape[2]), 1)
        xi, bi = xi.view(-1, heads, width), bi.view(-1, groups, 1, size).repeat_interleave(heads // groups, 1)
        s = time_steps(xi, None if dt is None else dti, dt_bias, dt_min, dt_max)[..., None, None]
        return torch.exp(s * a[:, None, None]) * h + s * xi[..., None] * bi

    def token(i: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = torch.cat((xs[:, i].flatten(1), bs[:, i].flatten(1), dts[:, i]), 1)
        new = again(h, given)
        return new, (new * cs[:, i, :, None]).sum(-1), given

    y = in_line(walk(state, rows, longest, token, again, replay), rows, len(x))
    return (y if d is None else y + d.float()[:, None] * x.float()).to(x.dtype)
