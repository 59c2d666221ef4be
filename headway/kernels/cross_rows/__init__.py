"""``cross_rows``: of each token of a step, whose encoder outputs it reads and how many there are.

cross_rows(query_start, row_slots, seq_lens, encoder_lens, slots, lens) -> ()

    query_start   int32 [R + 1], first token of each row; tokens from query_start[R] on are padding
    row_slots     int32 [R], row -> slot; -1 on padding          seq_lens  int32 [R], 0 on padding and zombie rows
    encoder_lens  int32 [S], encoder outputs of each slot
    slots         int32 [T], out: the slot of the token's row; -1 where it reads nothing (padding, zombies, no such slot)
    lens          int32 [T], out: encoder outputs of that slot; 0 where it reads nothing
"""

from __future__ import annotations

from headway.kernels.cross_rows.reference import cross_rows as _reference
from headway.kernels.registry import Op

cross_rows = Op(
    "cross_rows(Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor encoder_lens, Tensor(a!) slots, "
    "Tensor(b!) lens) -> ()",
    reference=_reference,
    triton="headway.kernels.cross_rows.triton:cross_rows",
)
