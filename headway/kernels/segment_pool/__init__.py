"""Sums and maxima of hidden states over the tokens of each row, in float32 and in the order of the tokens: what a row gets does
not depend on the rows beside it.

segment_pool(hidden, query_start, seq_lens, skip, kind) -> pooled
    hidden       [T, C] f32, f16 or bf16, last dimension contiguous
    query_start  int32 [R + 1], first token of each row
    seq_lens     int32 [R], position behind the row's last token; 0: the row gets 0, or -inf
    skip         int32 [R], position before which tokens do not count
    kind         0: sum; 1: maximum, -inf over nothing; 2: sum weighted by position + 1
    pooled       f32 [R, C]
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.segment_pool import reference

SUM, MAXIMUM, WEIGHTED_SUM = range(3)


def _meta(hidden: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty((seq_lens.shape[0], hidden.shape[1]), dtype=torch.float32, device=hidden.device)


segment_pool = Op(
    "segment_pool(Tensor hidden, Tensor query_start, Tensor seq_lens, Tensor skip, int kind) -> Tensor",
    reference=reference.segment_pool,
    meta=_meta,
    triton="headway.kernels.segment_pool.triton:segment_pool",
    cpu="headway.kernels.segment_pool.host:segment_pool",
)
