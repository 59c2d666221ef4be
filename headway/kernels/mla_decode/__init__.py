"""Attention of short rows over paged latents: queries lie in the space of the latents, which are keys and values at once.

mla_decode(q_latent, q, latents, block_tables, row_slots, query_start, seq_lens, selected, scale, most_queries, max_query_len,
           max_seq_len_bound) -> out
    q_latent      [T, H, L] (bf16, f16, f32), last dimension contiguous: queries multiplied into the latents' space
    q             [T, H, D], last dimension contiguous; the last Dr of each head are its rotated part, the others are not read
    latents       [NB, bs, L + Dr] in q's dtype or float8_e4m3fn, last dimension contiguous; bs a power of two
    block_tables  int32 [S, MB]; an id outside [0, NB) reads block 0
    row_slots     int32 [R], row -> row of block_tables; outside [0, S) (-1 on padding) the row's output is zeros
    query_start   int32 [R + 1], first token of each row
    seq_lens      int32 [R], context including this step's tokens, at most MB * bs; 0 (padding, zombie): output is zeros
    selected      int32 [T, K], the min(K, p + 1) positions that a token at p attends to, rising, and -1 behind them; None: all
                  up to its own
    scale         > 0, multiplies the scores
    most_queries  rows that have more tokens are left out
    max_query_len     >= every row's tokens; sizes grids only
    max_seq_len_bound >= every seq_len; sizes grids only
    out           [H, T, L] in q's dtype, contiguous; anything for tokens of other rows and of none

Token j of a row with n tokens sits at position p = seq_len - n + j. Its score at position i <= p is scale * (q_latent .
latent[i][:L] + q[-Dr:] . latent[i][L:]), and its output the softmax of the scores over latent[i][:L]. Scores and sums are
f32.
"""

from __future__ import annotations

import torch

from headway.kernels.mla_decode import reference
from headway.kernels.registry import Op


def _mla_decode_meta(q_latent: torch.Tensor, q: torch.Tensor, *_: object) -> torch.Tensor:
    tokens, heads, rank = q_latent.shape
    return torch.empty((heads, tokens, rank), dtype=q.dtype, device=q.device)


mla_decode = Op(
    "mla_decode(Tensor q_latent, Tensor q, Tensor latents, Tensor block_tables, Tensor row_slots, Tensor query_start, "
    "Tensor seq_lens, Tensor? selected, float scale, int most_queries, int max_query_len, int max_seq_len_bound) -> Tensor",
    reference=reference.mla_decode,
    meta=_mla_decode_meta,
    triton="headway.kernels.mla_decode.launch:mla_decode",
)
