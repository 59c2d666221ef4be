"""A decode step between the QKV projection and the output projection: ``rope_kv_write`` and ``paged_attention`` as one.

decode_attention(qkv, positions, cos_sin, q_norm, k_norm, eps, kv_slots, k_cache, v_cache, num_heads, block_tables, row_slots,
                 query_start, seq_lens, arrivals, scale, window, soft_cap, max_seq_len_bound, chunk, sinks, slopes,
                 width, shares) -> out
    qkv         [T, (H + 2 * KH) * D] projections
    positions   int32 [T], kv_slots int32 [T]: of those tokens, which are the last of their rows' seq_lens
    width       W: 1: a token a row, T = R. Above 1 rows have up to W tokens each, as ``query_start`` says, drafts among them;
                T <= W R, and ``arrivals`` is [>= T, KH]
    shares      qkv is [T, H * D], queries alone: another layer has written the tokens' keys and values at ``kv_slots``, and
                nothing is written
    out         [T, H, D] in qkv's dtype

All else is as the two ops have it, every row being a decode row where W = 1. A row of length 0 or without a valid slot need
not write its keys and values, though it has KV slots; no step has such rows. Keys of a row before its tokens are earlier
steps': kernels may read them before the step's writes have landed (``triton_early``, 2). Those of its tokens are read
behind the wait, so with ``shares`` an earlier kernel of the step may write them.
"""

from __future__ import annotations

import torch

from headway.kernels.decode_attention import reference
from headway.kernels.registry import Op


def _decode_attention_meta(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *_: object,
) -> torch.Tensor:
    return torch.empty((qkv.shape[0], num_heads, k_cache.shape[3]), dtype=qkv.dtype, device=qkv.device)


decode_attention = Op(
    "decode_attention(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor kv_slots, Tensor(a!) k_cache, Tensor(b!) v_cache, int num_heads, Tensor block_tables, Tensor row_slots, "
    "Tensor query_start, Tensor seq_lens, Tensor(c!) arrivals, float scale, int window, float soft_cap, "
    "int max_seq_len_bound, int chunk=0, Tensor? sinks=None, Tensor? slopes=None, int width=1, "
    "bool shares=False) -> Tensor",
    reference=reference.decode_attention,
    meta=_decode_attention_meta,
    triton="headway.kernels.decode_attention.triton:decode_attention",
    cpu="headway.kernels.cpu.ops:decode_attention",
)
