"""The selective scan of Mamba-1 (Gu and Dao 2023): a diagonal state of N numbers for each of D channels.

selective_scan(x, dt, dt_bias, a, b, c, d, z, state, query_start, row_slots, seq_lens, packed, max_chunks,
max_query_len) -> y
    x          [T, D] activations, last dimension contiguous (so are those of all other inputs)
    dt         [T, D] time steps before bias and softplus      dt_bias  [D]
    a          [D, N] f32, negative                            d        [D]
    b, c       [T, N]
    z          [T, D] gate, or None
    state      [S, D, N], written in place
    query_start, row_slots, seq_lens, packed, max_chunks, max_query_len   see ``causal_conv``
    y          [T, D] in x's dtype

With s = softplus(dt + dt_bias), for each token of a row: h = exp(s a) h + s b x; y = (sum over n of c h + d x)
silu(z). All in f32; ``state`` is read and written in its own dtype, once a step.
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.selective_scan.reference import selective_scan as _reference


def _meta(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


selective_scan = Op(
    "selective_scan(Tensor x, Tensor dt, Tensor dt_bias, Tensor a, Tensor b, Tensor c, Tensor d, Tensor? z, "
    "Tensor(a!) state, Tensor query_start, Tensor row_slots, Tensor seq_lens, Tensor packed, int max_chunks, "
    "int max_query_len) -> Tensor",
    reference=_reference,
    meta=_meta,
    triton="headway.kernels.selective_scan.triton:selective_scan",
    cpu="headway.kernels.selective_scan.cpu:selective_scan",
)
