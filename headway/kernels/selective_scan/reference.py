"""What ``selective_scan`` means, in torch, token by token. Reads no device value on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.state_rows import in_line, load_states, rows_of, side_by_side, store_states, within


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
) -> torch.Tensor:
    rows = rows_of(query_start, row_slots, seq_lens, len(state))
    inside = within(rows, max_query_len)[..., None, None]
    xs, dts, bs, cs = (side_by_side(each, rows, max_query_len).float() for each in (x, dt, b, c))
    steps = F.softplus(dts + dt_bias.float())
    h = load_states(state, rows)  # [R, D, N]
    ys = []
    for i in range(max_query_len):
        s = steps[:, i, :, None]
        new = torch.exp(s * a) * h + s * bs[:, i, None] * xs[:, i, :, None]
        h = torch.where(inside[:, i], new, h)
        ys.append((h * cs[:, i, None]).sum(-1))
    store_states(state, rows, h)
    y = in_line(torch.stack(ys, 1), rows, len(x)) + d.float() * x.float()
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)
