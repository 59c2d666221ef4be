"""``apply_edits``: writes the host's edits of a step into the slot tables.

apply_edits(Tensor(a!) arena, Tensor packed, int max_edits) -> ()

    arena      int32 [A]: all slot tables
    packed     int32 [P]: the packed step. packed[0] = number of edits, packed[1] = offset of their descriptors, each
               a triple (dst, src, len), len <= 1024
    max_edits  >= packed[0]; sizes the grid

For each edit arena[dst : dst + len] = packed[src : src + len]. An edit that would read or write out of range is
dropped whole. Edits of one step never overlap in the arena.
"""

from __future__ import annotations

from headway.kernels.apply_edits.reference import apply_edits as _reference
from headway.kernels.registry import Op

apply_edits = Op(
    "apply_edits(Tensor(a!) arena, Tensor packed, int max_edits) -> ()",
    reference=_reference,
    triton="headway.kernels.apply_edits.triton:apply_edits",
    cpu="headway.kernels.cpu.step_ops:apply_edits",
)
