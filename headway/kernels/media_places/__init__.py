"""What a step's tokens are within the pictures of their prompts.

media_places(positions, query_start, row_slots, table, rows, sees) -> out
    positions    int32 [T], of the tokens in their sequences
    query_start  int32 [R + 1], first token of each row; tokens from query_start[R] on are padding
    row_slots    int32 [R], row -> slot; outside [0, S): its tokens are padding
    table        int32 [S, RUNS_AT + RUN_WORDS * K]: number of runs, tokens of the prompt that all see each other (0: none),
                 then for each run of placeholders, rising: first position, end, first position of its rotation, columns,
                 what is added to positions behind, and to times within
    rows         int32 [S, K]: for each run the row of its first token's features
    sees         the tokens of a run see all of it, where it has columns: those of recordings have none
    out          int32 [5, T]: row of the features (-1: none), end of what the token sees, time, row and column of its rotation.
                 Padding: -1, 0, 0, 0, 0
"""

from __future__ import annotations

import torch

from headway.kernels.media_places import reference
from headway.kernels.registry import Op


def _meta(positions: torch.Tensor, *_: object) -> torch.Tensor:
    return positions.new_empty((5, positions.shape[0]))


media_places = Op(
    "media_places(Tensor positions, Tensor query_start, Tensor row_slots, Tensor table, Tensor rows, bool sees) -> Tensor",
    reference=reference.media_places,
    meta=_meta,
    triton="headway.kernels.media_places.triton:media_places",
)
