"""A product of its own for each head, of the tokens of short rows alone.

head_linear(x, w, out, query_start, most_queries) -> ()
    x            [T, H, K] (bf16, f16, f32), any strides
    w            [H, K, N] in x's dtype, any strides
    out          [T, H, N] in x's dtype, any strides; written in place
    query_start  int32 [R + 1], first token of each row
    most_queries tokens of rows that have more are left alone

out[t, h] = x[t, h] w[h], summed in f32 and rounded once; zeros for tokens that belong to no row, of which x is not looked at.
"""

from __future__ import annotations

from headway.kernels.head_linear import reference
from headway.kernels.registry import Op

head_linear = Op(
    "head_linear(Tensor x, Tensor w, Tensor(a!) out, Tensor query_start, int most_queries) -> ()",
    reference=reference.head_linear,
    triton="headway.kernels.head_linear.triton:head_linear",
)
