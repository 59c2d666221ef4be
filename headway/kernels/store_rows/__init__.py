"""Rows go to places of a table; those without a place go nowhere.

store_rows(table, places, rows)
    table   [M, W] f32, f16 or bf16, rows contiguous; written
    places  int32 [N], distinct where they lie in [0, M); a row whose place does not is left out
    rows    [N, W] in table's dtype, rows contiguous
"""

from __future__ import annotations

from headway.kernels.registry import Op
from headway.kernels.store_rows import reference

store_rows = Op(
    "store_rows(Tensor(a!) table, Tensor places, Tensor rows) -> ()",
    reference=reference.store_rows,
    triton="headway.kernels.store_rows.triton:store_rows",
)
