"""The selective scan of Mamba-1 (Gu and Dao 2023): a diagonal state of N numbers for each of D channels.

selective_scan(x, dt, dt_bias, a, b, c, d, z, state, query_start, row_slots, seq_lens, packed, max_chunks,
max_query_len, short, inputs=None, stored_at=None, store_at=None) -> y
    x          [T, D] activations, last dimension contiguous (so are those of all other inputs)
    dt         [T, D] time steps before bias and softplus      dt_bias  [D]
    a          [D, N] f32, negative                            d        [D]
    b, c       [T, N]
    z          [T, D] gate, or None
    state      [S, D, N], written in place
    query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short   see ``causal_conv``
    inputs     [S', M, 2 D + N] in x's dtype: x, dt and b of tokens whose state is not stored; written in place
    stored_at, store_at   int32 [R], see ``kernels.state_rows``; None: there is no ring, every row stores its state
    y          [T, D] in x's dtype

With s = softplus(dt + dt_bias), for each token of a row: h = exp(s a) h + s b x; y = (sum over n of c h + d x)
silu(z). All in f32; ``state`` is read in its own dtype, and written where it is stored, once a step at most.
"""

from __future__ import annotations

from headway.kernels.registry import Op, like_first
from headway.kernels.selective_scan.reference import selective_scan as _reference

selective_scan = Op(
    "selective_scan(Tensor x, Tensor dt, Tensor dt_bias, Tensor a, Tensor b, Tensor c, Tensor d, Tensor? z, "
    "Tensor(a!) state, Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor packed, int max_chunks, "
    "int max_query_len, int short, Tensor(b!)? inputs=None, Tensor? stored_at=None, Tensor? store_at=None) -> Tensor",
    reference=_reference,
    meta=like_first,
    triton="headway.kernels.selective_scan.triton:selective_scan",
    cpu="headway.kernels.selective_scan.cpu:selective_scan",
)
