"""The gated delta rule (Yang et al. 2024; with a decay for each channel: Kimi delta attention): a state [K, V] for
each head.

gated_delta(q, k, v, a, a_log, dt_bias, b, beta_scale, scale, state, query_start, row_slots, seq_lens, packed,
max_chunks,
            max_query_len, short, inputs=None, stored_at=None, store_at=None) -> o
    q, k       [T, HK, K]; v  [T, H, V]; HK divides H, and head h reads queries and keys of head h // (H / HK). The last
               dimension of these and of all other inputs is contiguous. Queries and keys are normalised here: x /
               sqrt(sum x^2 + 1e-6)
    a          [T, H] or [T, H, K]: the decay before softplus      a_log  f32 [H]      dt_bias  f32 [H] or [H, K]
    b          [T, H]
    state      [S, H, K, V], written in place
    query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short   see ``causal_conv``
    inputs     f32 [S', M, HK K + H V + H (or H K)]: normalised k, u and g of tokens whose state is not stored; written in place
    stored_at, store_at   int32 [R], see ``kernels.state_rows``; None: there is no ring, every row stores its state
    o          [T, H, V] in v's dtype

With g = -exp(a_log) softplus(a + dt_bias) and beta = beta_scale * sigmoid(b), for each token of a row:
h = exp(g) h; u = beta (v - k^T h); h = h + k u^T; o = scale q^T h. All in f32; ``state`` is read in its
own dtype, and written where it is stored, once a step at most. To run a token again takes h = exp(g) h + k u^T alone.
"""

from __future__ import annotations

import torch

from headway.kernels.gated_delta.reference import gated_delta as _reference
from headway.kernels.registry import Op


def _meta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


gated_delta = Op(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor a, Tensor a_log, Tensor dt_bias, Tensor b, float beta_scale, "
    "float scale, Tensor(a!) state, Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor packed, "
    "int max_chunks, int max_query_len, int short, Tensor(b!)? inputs=None, Tensor? stored_at=None, "
    "Tensor? store_at=None) -> Tensor",
    reference=_reference,
    meta=_meta,
    triton="headway.kernels.gated_delta.triton:gated_delta",
    cpu="headway.kernels.gated_delta.cpu:gated_delta",
)
