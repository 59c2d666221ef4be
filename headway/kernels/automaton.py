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
    flat, width = table.view(-1), table.shape[1]
    num_states, num_classes = info[..., 0], info[..., 1]
    length = tokens[-1]
    state = torch.where((state > 0) & (state < num_states) & (length > 0), state, 0)
    for position in range(4 * (tokens.shape[0] - 1)):
        byte = (tokens[position // 4] >> 8 * (position % 4)) & 255
        group = flat.take(base + byte)
        at = state.to(torch.int64) * num_classes + group
        inside = (group >= 0) & (group < num_classes) & (at >= 0) & (CLASS_INTS + at // 2 < width)
        pair = flat.take(base + torch.where(inside, CLASS_INTS + at // 2, 0))
        following = (pair >> (16 * (at % 2)).to(torch.int32)) & 0xFFFF
        following = torch.where(inside & (following < num_states), following, 0)
        state = torch.where((position < length) & (state != 0), following, state)
    return state
