"""What ``ssd_scan`` means, in torch, token by token. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.state_rows import in_line, load_states, rows_of, side_by_side, store_states, within


def time_steps(
    x: torch.Tensor, dt: torch.Tensor | None, dt_bias: torch.Tensor | None, dt_min: float, dt_max: float
) -> torch.Tensor:
    """f32 [T, H]."""
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
) -> torch.Tensor:
    rows = rows_of(query_start, row_slots, seq_lens, len(state))
    inside = within(rows, max_query_len)[..., None, None, None]
    heads, groups = x.shape[1], b.shape[1]
    steps = side_by_side(time_steps(x, dt, dt_bias, dt_min, dt_max), rows, max_query_len)
    xs, bs, cs = (side_by_side(each, rows, max_query_len).float() for each in (x, b, c))
    bs, cs = (each.repeat_interleave(heads // groups, 2) for each in (bs, cs))
    h = load_states(state, rows)  # [R, H, P, N]
    ys = []
    for i in range(max_query_len):
        s = steps[:, i, :, None, None]
        new = torch.exp(s * a[:, None, None]) * h + s * xs[:, i, :, :, None] * bs[:, i, :, None]
        h = torch.where(inside[:, i], new, h)
        ys.append((h * cs[:, i, :, None]).sum(-1))
    store_states(state, rows, h)
    y = in_line(torch.stack(ys, 1), rows, len(x))
    return (y if d is None else y + d.float()[:, None] * x.float()).to(x.dtype)
