"""Everything between the projections of a decode step: head norms, rotation, KV write and paged attention, in one launch.

decode_attention(qkv, k_cache, v_cache, block_tables, row_slots, seq_lens, kv_slots, cos_sin, q_norm, k_norm, finished,
                 num_heads, eps, scale, window, soft_cap, max_seq_len_bound) -> out
    qkv           [R, (H + 2 KH) * D], rows contiguous: one token of each row, projections in the order q, k, v
    k_cache, v_cache  [NB, bs, KH, D] in qkv's dtype, equal strides, head dimensions contiguous; written at ``kv_slots``
    block_tables  int32 [S, MB];  row_slots, seq_lens   int32 [R]: as ``paged_attention`` takes them
    kv_slots      int32 [R], block * bs + offset of the row's new token; -1 writes nothing
    cos_sin       f32 [L, D]: the whole head is rotated, D a power of two >= 16
    q_norm, k_norm    [D], weights of RMS norms of each head before the rotation, or None
    finished      int32 [>= R * KH], zeros; zeros again when the launch has run
    num_heads, eps    H; epsilon of the norms
    scale, window, soft_cap, max_seq_len_bound   as ``paged_attention`` takes them
    out           [R, H * D] in qkv's dtype; zeros for rows without a valid slot and rows of length 0

Equals ``rope_kv_write`` at positions seq_lens - 1, then ``paged_attention`` of R decode rows. The new token's keys and
values are used as the cache will hold them, but are taken from qkv: no program waits for another's write.
"""

from __future__ import annotations

import torch

from headway.kernels.decode_attention import reference
from headway.kernels.registry import Op


def serves(head_dim: int, rotary_dim: int) -> bool:
    """Whether the op takes heads of this size, of which this many dimensions are rotated."""
    return head_dim == rotary_dim and head_dim >= 16 and head_dim & (head_dim - 1) == 0


def _meta(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_slots: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    finished: torch.Tensor,
    num_heads: int,
    eps: float,
    scale: float,
    window: int,
    soft_cap: float,
    max_seq_len_bound: int,
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads * k_cache.shape[3]))


decode_attention = Op(
    "decode_attention(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_tables, Tensor row_slots, "
    "Tensor seq_lens, Tensor kv_slots, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, Tensor(c!) finished, "
    "int num_heads, float eps, float scale, int window, float soft_cap, int max_seq_len_bound) -> Tensor",
    reference=reference.decode_attention,
    meta=_meta,
    triton="headway.kernels.decode_attention.launch:decode_attention",
)
