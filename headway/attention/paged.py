"""``PagedAttention``: rotary embedding, KV write and causal attention of one layer, over the paged cache.

Shapes: T tokens of the step, H query heads, KH key/value heads, D head size, NB blocks of bs tokens, L positions.
"""

from __future__ import annotations

from typing import cast

import torch

from headway.kernels.paged_attention import paged_attention
from headway.kernels.rope_kv_write import rope_kv_write
from headway.state.batch import StepBatch


class PagedAttention:
    """Causal grouped-query attention of one layer. Holds numbers only; tensors come with each call.

    Args:
        num_heads, num_kv_heads, head_dim: H, KH, D; H is a multiple of KH.
        scale: factor on the scores, usually D ** -0.5.
        window: a query at position p sees keys at positions > p - window; 0 sees all.
        soft_cap: scores become cap * tanh(score / cap); 0 is off.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> None:
        assert num_heads % num_kv_heads == 0
        assert window >= 0
        assert soft_cap >= 0.0
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window, self.soft_cap = scale, window, soft_cap

    def __call__(
        self,
        qkv: torch.Tensor,
        batch: StepBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Write this step's keys and values into the cache, then attend.

        Args:
            qkv: [T, (H + 2 KH) * D], projections in the order q, k, v.
            k_cache, v_cache: [NB, bs, KH, D], this layer's cache; written at ``batch.kv_slots``.
            cos_sin: float32 [L, Drot], see ``models.rope``.
            q_norm, k_norm: [D] per-head RMSNorm weights applied before the rotation, or None.
            eps: of those norms.

        Returns:
            [T, H * D] in qkv's dtype; zeros on rows that are padding or zombies.
        """
        q = rope_kv_write(  # [T, H, D]
            qkv, batch.positions, cos_sin, q_norm, k_norm, eps, batch.kv_slots, k_cache, v_cache, self.num_heads
        )
        return self.attend(q, batch, k_cache, v_cache)

    def attend(self, q: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], normalised and rotated, of a step whose keys and values are in the cache -> [T, H * D]."""
        out = paged_attention(  # [T, H, D]
            q,
            k_cache,
            v_cache,
            batch.block_tables,
            batch.row_slots,
            batch.query_start,
            batch.seq_lens,
            batch.arrivals,
            self.scale,
            self.window,
            self.soft_cap,
            batch.num_decode_rows,
            batch.max_query_len,
            batch.max_seq_len_bound,
        )
        return cast(torch.Tensor, out).flatten(1)
