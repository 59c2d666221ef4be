"""Attention of long rows over keys and values that were made of latents: of the step's own tokens, and piece by piece of what
earlier steps have cached.

mla_gather(latents, block_tables, row_slots, query_start, seq_lens, first, size, most_queries, dtype) -> piece
    latents, block_tables, row_slots, query_start, seq_lens   as ``mla_decode`` has them
    first, size  the piece: tokens [first, first + size) of the contexts of all long rows, one behind the other
    most_queries rows that have more tokens are long
    piece        [size, L + Dr] in ``dtype``, zeros behind the last context

mla_prefill(q, kv, key, out, sums, query_start, seq_lens, scale, first, most_queries, prefix_bound) -> ()
    q            [T, H, D] (bf16, f16, f32), last dimension contiguous
    kv           [N, H, Dn + Dv] in q's dtype, contiguous: each key's first Dn elements and its value
    key          [N, Dr] in q's dtype, last dimension contiguous: the other elements of the keys of all heads; Dn + Dr = D
    out          [T, H, Dv] in q's dtype or f32, contiguous; written in place
    sums         f32 [T, H], or None: base-2 logarithms of the sums of the weights behind ``out``
    query_start  int32 [R + 1], seq_lens int32 [R]
    scale        > 0, multiplies the scores
    first        -1: kv is of the step's own N = T tokens, of which each token sees those of its row up to itself, and out and
                 sums are made. From 0 on: kv is of the piece that begins there, of which each token sees what its row has in
                 it, and out and sums, which hold what was seen so far, take it in
    most_queries tokens of rows that do not have more are left alone
    prefix_bound >= the tokens of all long rows' contexts: with -1, how far the pieces that follow will go

Rows of length 0 and tokens of no row get zeros (with first = -1). Scores and sums are f32. The context of a row with n tokens
are the seq_len - n before them.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.kernels.mla_prefill import reference
from headway.kernels.registry import Op


def _mla_gather_meta(latents: torch.Tensor, *others: Any) -> torch.Tensor:
    *_, size, _, dtype = others
    return torch.empty((size, latents.shape[2]), dtype=dtype, device=latents.device)


mla_gather = Op(
    "mla_gather(Tensor latents, Tensor block_tables, Tensor row_slots, Tensor query_start, Tensor seq_lens, int first, "
    "int size, int most_queries, ScalarType dtype) -> Tensor",
    reference=reference.mla_gather,
    meta=_mla_gather_meta,
    triton="headway.kernels.mla_prefill.triton:mla_gather",
)
mla_prefill = Op(
    "mla_prefill(Tensor q, Tensor kv, Tensor key, Tensor(a!) out, Tensor(b!)? sums, Tensor query_start, Tensor seq_lens, "
    "float scale, int first, int most_queries, int prefix_bound) -> ()",
    reference=reference.mla_prefill,
    triton="headway.kernels.mla_prefill.triton:mla_prefill",
)
