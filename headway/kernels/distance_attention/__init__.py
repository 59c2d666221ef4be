"""Causal attention over the paged KV cache whose scores have a learned bias by distance (T5, Raffel et al. 2020).

distance_attention(q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, bias, scale, max_seq_len_bound) -> out
    q             [T, H, D] (bf16, f16, f32), last two dimensions contiguous
    k_cache, v_cache  [NB, bs, H, D] in q's dtype or float8_e4m3fn, equal strides, head dimensions contiguous
    block_tables  int32 [S, MB]; an id outside [0, NB) reads block 0
    row_slots     int32 [R], row -> row of block_tables; outside [0, S) (-1 on padding) the row's output is zeros
    query_start   int32 [R + 1], first token of each row
    seq_lens      int32 [R], context including this step's tokens, at most MB * bs; 0 (padding, zombie): output is zeros
    bias          f32 [H, L] contiguous: bias[h, i - j] is added to the scaled score of the query at i and the key at j; from L
                  on the last one is
    scale         multiplies q . k
    max_seq_len_bound >= every seq_len
    out           [T, H, D] in q's dtype; tokens past query_start[R] are zeros
"""

from __future__ import annotations

from headway.kernels.distance_attention import reference
from headway.kernels.registry import Op, like_first

distance_attention = Op(
    "distance_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor row_slots, Tensor query_start, "
    "Tensor seq_lens, Tensor bias, float scale, int max_seq_len_bound) -> Tensor",
    reference=reference.distance_attention,
    meta=like_first,
    triton="headway.kernels.distance_attention.triton:distance_attention",
)
