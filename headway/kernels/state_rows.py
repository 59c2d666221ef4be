"""What the references of recurrent operations share: rows of a step laid side by side, and states by slot.

The operations take, of a step, ``query_start`` int32 [R + 1], ``row_slots`` int32 [R] and ``seq_lens`` int32 [R] (0 on
zombies and padding), as ``StepBatch`` has them. A row whose tokens begin at position 0 has no state: what its slot
holds is never read. A row that is not live (zombie, padding, a slot outside the table, no token) writes no state, and
its outputs are finite but mean nothing.

Nothing here reads a device value on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """The rows of a step.

    Attributes:
        first: int64 [R], first token.
        lens: int64 [R], tokens.
        slots: int64 [R], 0 where there is none.
        starts: int64 [R], position of the first token.
        live: bool [R].
    """

    first: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    live: torch.Tensor


def rows_of(query_start: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, num_slots: int) -> Rows:
    """The rows that the three describe, where the states have ``num_slots`` slots."""
    first = query_start[:-1].long()
    lens = query_start[1:].long() - first
    slots = row_slots.long()
    starts = seq_lens.long() - lens
    live = (slots >= 0) & (slots < num_slots) & (seq_lens > 0) & (lens > 0) & (starts >= 0)
    return Rows(first, lens, torch.where(live, slots, 0), starts, live)


def side_by_side(x: torch.Tensor, rows: Rows, longest: int) -> torch.Tensor:
    """[T, ...] -> [R, longest, ...]; places behind a row's end hold any token."""
    at = rows.first[:, None] + torch.arange(longest, device=x.device)
    return x[at.clamp(0, x.shape[0] - 1)]


def within(rows: Rows, longest: int) -> torch.Tensor:
    """bool [R, longest]: places that hold a token of a live row."""
    return rows.live[:, None] & (torch.arange(longest, device=rows.lens.device) < rows.lens[:, None])


def owners(rows: Rows, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token its row, its place in the row, and whether that row is live and has it: [T] each."""
    token = torch.arange(num_tokens, device=rows.first.device)
    row = (torch.searchsorted(rows.first.contiguous(), token, right=True) - 1).clamp(min=0)
    place = token - rows.first[row]
    return row, place, rows.live[row] & (place >= 0) & (place < rows.lens[row])


def in_line(y: torch.Tensor, rows: Rows, num_tokens: int) -> torch.Tensor:
    """[R, longest, ...] -> [T, ...]; zeros for tokens of no live row."""
    row, place, real = owners(rows, num_tokens)
    found = y[row, place.clamp(0, y.shape[1] - 1)]
    return torch.where(real.view(-1, *[1] * (found.dim() - 1)), found, 0)


def load_states(states: torch.Tensor, rows: Rows) -> torch.Tensor:
    """float32 [R, ...]: the state with which each row begins, zeros for rows that begin at position 0."""
    kept = rows.live & (rows.starts > 0)
    found = states[rows.slots].float()
    return torch.where(kept.view(-1, *[1] * (found.dim() - 1)), found, 0)


def store_states(states: torch.Tensor, rows: Rows, new: torch.Tensor) -> None:
    """Write ``new`` [R, ...] to the slots of live rows; all other slots keep what they have."""
    mine = rows.live & (rows.slots == torch.arange(len(states), device=states.device)[:, None])  # [S, R]
    found = new[mine.int().argmax(1)].to(states.dtype)
    states.copy_(torch.where(mine.any(1).view(-1, *[1] * (found.dim() - 1)), found, states))
