"""Attention over the paged KV cache in which a query sees up to an end of its own, which may lie behind it: tokens of a picture
see all of the picture, or those of a prompt all of the prompt.

span_attention(q, k_cache, v_cache, block_tables, row_slots, query_start, seq_lens, ends, scale, window, soft_cap,
               max_query_len, max_seq_len_bound) -> out
    ends   int32 [T]: a query sees positions before its end, as far as the row has them; its own it sees in any case
    The others are those of ``paged_attention``, and so is the result; with a window a query at position p sees positions from
    p - window + 1 on, however far its end lies behind.
"""

from __future__ import annotations

from headway.kernels.registry import Op, like_first
from headway.kernels.span_attention import reference

span_attention = Op(
    "span_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor row_slots, Tensor query_start, "
    "Tensor seq_lens, Tensor ends, float scale, int window, float soft_cap, int max_query_len, int max_seq_len_bound) "
    "-> Tensor",
    reference=reference.span_attention,
    meta=like_first,
    triton="headway.kernels.span_attention.triton:span_attention",
)
