"""A mixer of Mamba-2 between its products in steps of short rows alone, each a token or a token and its drafts: ``causal_conv``
and ``ssd_scan`` in one launch.

ssd_decode(x, weight, bias, ring, dt, dt_bias, a, d, dt_min, dt_max, state, query_start, row_slots, seq_lens, packed,
           max_chunks, max_query_len, short, inputs=None, stored_at=None, store_at=None) -> y
    x          [T, C] with C = H P + 2 G N: x, b and c of the scan side by side, before the convolution
    weight, bias, ring   of the convolution, whose result goes through silu; see ``causal_conv``
    dt, dt_bias, a, d, dt_min, dt_max, state   of the scan, see ``ssd_scan``; none of them is missing
    query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short   see ``causal_conv``;
               max_query_len <= short, and the window has a place for each token of a row beside what is read for the first
    inputs, stored_at, store_at   of the scan, see ``ssd_scan``; ``inputs`` is written in place
    y          [T, H, P] in x's dtype, zeros for tokens of no live row

What is convolved is rounded to x's dtype, as where ``causal_conv`` stores it.
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.ssd_decode.reference import ssd_decode as _reference


def _meta(x: torch.Tensor, *args: object) -> torch.Tensor:
    state = args[9]
    assert isinstance(state, torch.Tensor)
    return torch.empty(x.shape[0], *state.shape[1:3], dtype=x.dtype, device=x.device)


ssd_decode = Op(
    "ssd_decode(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) ring, Tensor dt, Tensor dt_bias, Tensor a, Tensor d, "
    "float dt_min, float dt_max, Tensor(b!) state, Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor packed, "
    "int max_chunks, int max_query_len, int short, Tensor(c!)? inputs=None, Tensor? stored_at=None, "
    "Tensor? store_at=None) -> Tensor",
    reference=_reference,
    meta=_meta,
    triton="headway.kernels.ssd_decode.triton:ssd_decode",
    cpu="headway.kernels.ssd_decode.cpu:ssd_decode",
)
