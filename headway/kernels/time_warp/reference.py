"""What ``time_warp`` means, in torch: diagonal by diagonal, whose cells do not need each other. Reads nothing on the host."""

from __future__ import annotations

import torch


def time_warp(costs: torch.Tensor) -> torch.Tensor:
    """See the package.

    A cell that is not entered from its left keeps 2 * frame + (1 if it is entered from above alone); the others keep what the
    cell on their left has. So a row's last cell on the way says where the way entered the row.
    """
    num_tokens, num_frames = costs.shape
    diagonals = num_frames + num_tokens - 1
    token = torch.arange(num_tokens, device=costs.device)
    nowhere = torch.full((num_tokens,), float("inf"), device=costs.device)
    # Diagonal d of the table is column d of this: row t is shifted by t.
    shifted = torch.cat((costs, costs.new_zeros(num_tokens, num_tokens)), 1).flatten()
    shifted = shifted[: num_tokens * diagonals].view(num_tokens, diagonals)
    total, beside = nowhere, nowhere.clone()  # of the diagonal before: its cells, and those of the tokens before
    beside[:1] = 0.0  # the way comes from ahead of the first frame
    code, codes = torch.zeros(num_tokens, dtype=torch.int64, device=costs.device), []
    for d in range(diagonals):
        frame = d - token
        above = torch.cat((nowhere[:1], total[:-1]))
        both = (beside < above) & (beside < total)
        down = ~both & (above < beside) & (above < total)
        best = torch.where(both, beside, torch.where(down, above, total))
        code = torch.where(both, 2 * frame, torch.where(down, 2 * frame + 1, code))
        total = torch.where((frame >= 0) & (frame < num_frames), shifted[:, d] + best, nowhere)
        beside = above
        codes.append(code)
    table = torch.stack(codes, 1)  # [T, diagonals], shifted
    starts, end = [], torch.full((1,), num_frames - 1, device=costs.device)
    for t in range(num_tokens - 1, -1, -1):
        entered = table[t].gather(0, end + t).clamp(0, 2 * num_frames - 1)
        starts.append(entered // 2)
        end = (entered // 2 - 1 + entered % 2).clamp(min=0)
    return torch.cat(starts[::-1]).int()
