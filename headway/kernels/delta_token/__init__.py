"""What stands between the products of a gated delta net, for steps of decode rows alone: ``causal_conv`` over queries, keys
and values, ``gated_delta``, ``gated_rms_norm`` of each head. One launch where these would be three.

delta_token(x, weight, ring, a, a_log, dt_bias, b, beta_scale, scale, state, gate, norm, eps, sigmoid,
            query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short) -> y
    x          [T, C] queries, keys and values side by side, last dimension contiguous; C = 2 HK K + H V
    weight, ring   [C, W] and [S, M, C], see ``causal_conv``; silu, no bias. ``ring`` is written in place
    a, a_log, dt_bias, b, beta_scale, scale, state   see ``gated_delta``; state [S, H, K, V] is written in place
    gate       [T, H V], last dimension contiguous     norm  [V]     eps, sigmoid   see ``gated_rms_norm``
    max_query_len  1; this and the others of the step as ``causal_conv`` has them
    y          [T, H V] in x's dtype

It rounds where the three do: the convolution's and the rule's results to x's dtype.
"""

from __future__ import annotations

import torch

from headway.kernels.delta_token.reference import delta_token as _reference
from headway.kernels.registry import Op


def _meta(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.empty(others[9].shape, dtype=x.dtype, device=x.device)


delta_token = Op(
    "delta_token(Tensor x, Tensor weight, Tensor(a!) ring, Tensor a, Tensor a_log, Tensor dt_bias, Tensor b, "
    "float beta_scale, float scale, Tensor(b!) state, Tensor gate, Tensor norm, float eps, bool sigmoid, "
    "Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor packed, int max_chunks, int max_query_len, "
    "int short) -> Tensor",
    reference=_reference,
    meta=_meta,
    triton="headway.kernels.delta_token.triton:delta_token",
)
