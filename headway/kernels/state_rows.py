"""What the references of recurrent operations share: rows of a step laid side by side, and states by slot.

The operations take, of a step, ``query_start`` int32 [R + 1], ``row_slots`` int32 [R] and ``seq_lens`` int32 [R] (0 on
zombies and padding), as ``StepBatch`` has them. A row whose tokens begin at position 0 has no state: what its slot
holds is never read. A row that is not live (zombie, padding, a slot outside the table, no token) writes no state, and
its outputs are finite but mean nothing.

With a ring of inputs the stored state is older than the row: ``inputs`` [S', M, E], S' <= S, ``stored_at`` and ``store_at``
int32 [R] (as ``replay_rows`` gives them). The state of a row's slot has seen ``stored_at`` tokens. The inputs of those from
there to the row's first lie in the ring, that of the token at position p at place p % M; they are run again before the row's
own tokens. The state is stored when it has seen ``store_at`` tokens, one of the row's among them, or not at all (-1). Inputs
of tokens behind that go into the ring, those of drafts that will be rejected included: the next row writes over them.

Nothing here reads a device value on the host.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Replay(NamedTuple):
    """A ring of inputs; see above.

    Attributes:
        inputs: [S, M, E].
        stored_at, store_at: int [R].
        most: >= tokens that any row runs again; at most M.
    """

    inputs: torch.Tensor
    stored_at: torch.Tensor
    store_at: torch.Tensor
    most: int


def replay_of(
    inputs: torch.Tensor | None, stored_at: torch.Tensor | None, store_at: torch.Tensor | None
) -> Replay | None:
    """Of an operation's last arguments, which come together or not at all."""
    if inputs is None or stored_at is None or store_at is None:
        return None
    return Replay(inputs, stored_at, store_at, inputs.shape[1])


Token = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Again = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def walk(
    state: torch.Tensor, rows: Rows, longest: int, token: Token, again: Again, replay: Replay | None
) -> torch.Tensor:
    """Run a recurrence over the rows, token by token; gives [R, longest, ...].

    Args:
        state: [S, ...], written.
        token: of the n-th token of each row and states f32 [R, ...]: new states, outputs [R, ...], inputs [R, E].
        again: of states and inputs f32 [R, E]: new states.
    """
    stored_at = rows.starts if replay is None else replay.stored_at.long()
    ends = rows.starts + rows.lens if replay is None else replay.store_at.long()
    h = load_states(state, rows, stored_at)
    for i in range(0 if replay is None else replay.most):
        assert replay is not None
        position = stored_at + i
        found = replay.inputs[rows.slots, position % replay.inputs.shape[1]].float()
        h = _where(rows.live & (position < rows.starts), again(h, found), h)
    stored, outs, given = h, [], []
    for i in range(longest):
        here = rows.live & (i < rows.lens)
        new, out, inputs = token(i, h)
        h = _where(here, new, h)
        stored = _where(here & (rows.starts + i + 1 == ends), h, stored)
        outs.append(out)
        given.append(inputs)
    store_states(state, rows, stored, ends >= 0)
    if replay is not None:
        for i, inputs in enumerate(given):
            position = rows.starts + i
            _store_inputs(replay.inputs, rows, inputs, position, (i < rows.lens) & (position >= ends))
    return torch.stack(outs, 1)


def _store_inputs(
    ring: torch.Tensor, rows: Rows, inputs: torch.Tensor, position: torch.Tensor, wanted: torch.Tensor
) -> None:
    """Write ``inputs`` [R, E] of the tokens at ``position`` to their places, for live rows that are ``wanted``."""
    slot = torch.arange(len(ring), device=ring.device)
    mine = rows.live & wanted & (rows.slots == slot[:, None])  # [S, R]
    row = mine.int().argmax(1)
    place = position[row] % ring.shape[1]
    ring[slot, place] = torch.where(mine.any(1)[:, None], inputs[row].to(ring.dtype), ring[slot, place])


def _where(condition: torch.Tensor, this: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """By rows."""
    return torch.where(condition.view(-1, *[1] * (this.dim() - 1)), this, other)


def load_states(states: torch.Tensor, rows: Rows, stored_at: torch.Tensor) -> torch.Tensor:
    """float32 [R, ...]: the states of each row's slot, zeros where these have seen no token."""
    return _where(rows.live & (stored_at > 0), states[rows.slots].float(), torch.zeros((), device=states.device))


def store_states(states: torch.Tensor, rows: Rows, new: torch.Tensor, wanted: torch.Tensor) -> None:
    """Write ``new`` [R, ...] to the slots of live rows that are ``wanted``; all other slots keep what they have."""
    mine = rows.live & wanted & (rows.slots == torch.arange(len(states), device=states.device)[:, None])  # [S, R]
    found = new[mine.int().argmax(1)].to(states.dtype)
    states.copy_(_where(mine.any(1), found, states))
