"""How the torch references follow an automaton; the layout is in ``grammar_mask``."""

from __future__ import annotations

import torch

from headway.core.automaton import CLASS_INTS


def walk(
    table: torch.Tensor, base: torch.Tensor, info: torch.Tensor, state: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """State after each token; 0 for tokens of no length and whatever leaves a table.

    Args:
        table: int32 [S, W], all slots' automata.
        base: int64, first int of the slot's automaton.
        info: int32 [..., 3] = (states, classes, first accepting state).
        state: int32, before the token. base, info[..., 0], state and tokens[0] broadcast.
        tokens: int32 [C + 1, ...], columns of the vocabulary.
    """
    flat, room = table.view(-1), 2 * (table.shape[1] - CLASS_INTS)
    num_states, num_classes = info[..., 0], info[..., 1]
    length = tokens[-1]
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=table.device).view(-1, *[1] * length.dim())
    groups = flat.take(base + ((tokens[:-1, None] >> shifts) & 255).flatten(0, 1))  # [4 C, ...]
    groups = torch.where((groups >= 0) & (groups < num_classes), groups, room)  # what is out of range stays so
    state = torch.where((state > 0) & (state < num_states) & (length > 0), state, 0)
    for position, group in enumerate(groups):
        at = (state * num_classes).to(torch.int64) + group
        inside = (at >= 0) & (at < room)
        pair = flat.take(base + torch.where(inside, CLASS_INTS + (at >> 1), 0))
        following = (pair >> ((at & 1) << 4)) & 0xFFFF
        following = torch.where(inside & (following < num_states), following, 0)
        state = torch.where((position < length) & (state != 0), following, state).to(torch.int32)
    return state
