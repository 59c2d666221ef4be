"""The scan of Mamba-2 (state space duality, Dao and Gu 2024): a matrix state [P, N] for each of H heads, scalar decays.

ssd_scan(x, dt, dt_bias, a, b, c, d, dt_min, dt_max, state, query_start, row_slots, seq_lens, packed, max_chunks,
         max_query_len, short, inputs=None, stored_at=None, store_at=None) -> y
    x          [T, H, P] activations; the last dimension of this and of all other inputs is contiguous
    dt         [T, H] time steps before bias and softplus, or None: they are 1      dt_bias  [H] or None
    a          [H] f32, <= 0
    b, c       [T, G, N]; G divides H, and head h reads group h // (H / G)
    d          [H] or None: 0
    dt_min, dt_max   limits of the time steps
    state      [S, H, P, N], written in place
    query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short   see ``causal_conv``
    inputs     [S', M, H P + G N + H] in x's dtype, without the last H where there is no dt: x, b and dt of tokens whose state
               is not stored; written in place
    stored_at, store_at   int32 [R], see ``kernels.state_rows``; None: there is no ring, every row stores its state
    y          [T, H, P] in x's dtype

With s = clamp(softplus(dt + dt_bias), dt_min, dt_max), for each token of a row: h = exp(s a) h + s x b^T; y = h c + d
x. All in f32; ``state`` is read in its own dtype, and written where it is stored, once a step at most. Linear attention
with a decay a head (lightning attention, Qin et al. 2024) is the case without dt: x are values, b keys, c queries.
"""

from __future__ import annotations

from headway.kernels.registry import Op, like_first
from headway.kernels.ssd_scan.reference import ssd_scan as _reference

ssd_scan = Op(
    "ssd_scan(Tensor x, Tensor? dt, Tensor? dt_bias, Tensor a, Tensor b, Tensor c, Tensor? d, float dt_min, "
    "float dt_max, Tensor(a!) state, Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor packed, "
    "int max_chunks, int max_query_len, int short, Tensor(b!)? inputs=None, Tensor? stored_at=None, "
    "Tensor? store_at=None) -> Tensor",
    reference=_reference,
    meta=like_first,
    triton="headway.kernels.ssd_scan.triton:ssd_scan",
    cpu="headway.kernels.ssd_scan.cpu:ssd_scan",
)
