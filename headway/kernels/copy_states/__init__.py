"""Copies states from slot to slot: checkpoints into the slots of rows that begin behind a prefix, and slots into checkpoints.

copy_states(storage, packed, header_at, max_copies) -> ()
    storage     int32 [S, E], a row for each slot, E a multiple of 4; written in place
    packed      int32 [P], the packed step: packed[header_at] is the position of a list of (source, destination) slots,
                packed[header_at + 1] their number
    max_copies  >= their number; sizes the grid

No destination is a source, or listed twice. A pair with a slot outside [0, S) copies nothing.
"""

from __future__ import annotations

from headway.kernels.copy_states.reference import copy_states as _reference
from headway.kernels.registry import Op

copy_states = Op(
    "copy_states(Tensor(a!) storage, Tensor packed, int header_at, int max_copies) -> ()",
    reference=_reference,
    triton="headway.kernels.copy_states.triton:copy_states",
    cpu="headway.kernels.copy_states.cpu:copy_states",
)
