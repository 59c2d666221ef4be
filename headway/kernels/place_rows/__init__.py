"""Rows of one table take the place of rows of another, or are added to them.

place_rows(x, features, rows, first, add)
    x         [T, C] f32, f16 or bf16, rows contiguous; written
    features  [M, W] in x's dtype, rows contiguous
    rows      int32 [T], the row of features for each row of x; outside [0, M): x's row stays as it is
    first     column of features that x's first one takes; first + C <= W
    add       they are added
"""

from __future__ import annotations

from headway.kernels.place_rows import reference
from headway.kernels.registry import Op

place_rows = Op(
    "place_rows(Tensor(a!) x, Tensor features, Tensor rows, int first, bool add) -> ()",
    reference=reference.place_rows,
    triton="headway.kernels.place_rows.triton:place_rows",
)
