"""What stands between the products of a gated delta net, for steps of short rows alone, each a token or a token and its drafts:
``causal_conv`` over queries, keys and values, ``gated_delta``, ``gated_rms_norm`` of each head. One launch where these would be
three.

delta_decode(x, weight, ring, a, a_log, dt_bias, b, beta_scale, scale, state, gate, norm, eps, sigmoid,
             query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short, inputs=None, stored_at=None,
             store_at=None) -> y
    x          [T, C] queries, keys and values side by side, last dimension contiguous; C = 2 HK K + H V
    weight, ring   [C, W] and [S, M, C], see ``causal_conv``; silu, no bias; M >= W + max_query_len - 1. ``ring`` is written in
               place
    a, a_log, dt_bias, b, beta_scale, scale, state   see ``gated_delta``; state [S, H, K, V] is written in place
    gate       [T, H V], last dimension contiguous     norm  [V]     eps, sigmoid   see ``gated_rms_norm``
    max_query_len  <= short; this and the others of the step as ``causal_conv`` has them
    inputs, stored_at, store_at   see ``gated_delta``; ``inputs`` is written in place
    y          [T, H V] in x's dtype, zeros for tokens of no live row

It rounds where the three do: the convolution's and the rule's results to x's dtype. A state that has seen a token again has the
bits that it would have if it had been stored.
"""

from __future__ import annotations

import torch

from headway.kernels.delta_decode.reference import delta_decode as _reference
from headway.kernels.registry import Op


def _meta(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.empty(others[9].shape, dtype=x.dtype, device=x.device)


delta_decode = Op(
    "delta_decode(Tensor x, Tensor weight, Tensor(a!) ring, Tensor a, Tensor a_log, Tensor dt_bias, Tensor b, "
    "float beta_scale, float scale, Tensor(b!) state, Tensor gate, Tensor norm, float eps, bool sigmoid, "
    "Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor packed, int max_chunks, int max_query_len, "
    "int short, Tensor(c!)? inputs=None, Tensor? stored_at=None, Tensor? store_at=None) -> Tensor",
    reference=_reference,
    meta=_meta,
    triton="headway.kernels.delta_decode.triton:delta_decode",
)
