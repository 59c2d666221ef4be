"""The sparse indexer of latent attention (DeepSeek-V3.2): cheap scores of all earlier tokens, and the best of them for each
token.

index_write(q, k, positions, cos_sin, weight, bias, eps, kv_slots, keys) -> ()
    q          [T, H, D] queries, last dimension contiguous; the first Dr of each head are rotated in place
    k          [T, D] projections, last dimension contiguous
    positions  int32 [T]; a position outside the table is clamped to it
    cos_sin    f32 [P, Dr], as ``rope_kv_write`` has it; Dr <= D
    weight, bias, eps  [D] each, of a layer norm of k, in f32, rounded once; then its first Dr are rotated, too
    kv_slots   int32 [T], block * block_size + offset; a slot outside [0, NB * bs) (-1 on padding) writes nothing
    keys       [NB, bs, D], last dimension contiguous; written in place. In k's dtype or float8_e4m3fn, see ``mla_write``

index_scores(q, weights, keys, block_tables, row_slots, query_start, seq_lens, first, scale, max_seq_len_bound) -> scores
    q          [N, H, D], weights [N, H], last dimensions contiguous: of tokens [first, first + N) of the step
    keys, block_tables, row_slots, query_start, seq_lens, max_seq_len_bound   as ``mla_decode`` has them
    scores     f32 [N, max_seq_len_bound]: of a token at position p, at i <= p sum over h of weights[h] * relu(scale * q[h] .
               keys[i]); anything elsewhere

index_topk(scores, positions, selected) -> ()
    scores     f32 [N, B], contiguous; NaN counts as -inf
    positions  int32 [N], p of each token, clamped to [0, B)
    selected   int32 [N, K], rows contiguous; written in place: the min(K, p + 1) positions up to p with the highest scores,
               rising, and -1 behind them. Of equal scores those at the lowest positions are taken
"""

from __future__ import annotations

from typing import Any

import torch

from headway.kernels.mla_index import reference
from headway.kernels.registry import Op


def _index_scores_meta(q: torch.Tensor, *others: Any) -> torch.Tensor:
    *_, max_seq_len_bound = others
    return torch.empty((q.shape[0], max_seq_len_bound), dtype=torch.float32, device=q.device)


index_write = Op(
    "index_write(Tensor(a!) q, Tensor k, Tensor positions, Tensor cos_sin, Tensor weight, Tensor bias, float eps, "
    "Tensor kv_slots, Tensor(b!) keys) -> ()",
    reference=reference.index_write,
    triton="headway.kernels.mla_index.triton:index_write",
)
index_scores = Op(
    "index_scores(Tensor q, Tensor weights, Tensor keys, Tensor block_tables, Tensor row_slots, Tensor query_start, "
    "Tensor seq_lens, int first, float scale, int max_seq_len_bound) -> Tensor",
    reference=reference.index_scores,
    meta=_index_scores_meta,
    triton="headway.kernels.mla_index.triton:index_scores",
)
index_topk = Op(
    "index_topk(Tensor scores, Tensor positions, Tensor(a!) selected) -> ()",
    reference=reference.index_topk,
    triton="headway.kernels.mla_index.triton_topk:index_topk",
)
