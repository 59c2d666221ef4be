"""``PagedAttention``: rotary embedding, KV write and causal attention of one layer, over the paged cache.

Shapes: T tokens of the step, H query heads, KH key/value heads, D head size, NB blocks of bs tokens, L positions.
"""

from __future__ import annotations

from typing import cast

import torch

from headway.kernels.decode_attention import decode_attention
from headway.kernels.paged_attention import paged_attention
from headway.kernels.rope_kv_write import rope_kv_write
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


class PagedAttention:
    """Causal grouped-query attention of one layer. Holds numbers only; tensors come with each call.

    Args:
        num_heads, num_kv_heads, head_dim: H, KH, D; H is a multiple of KH.
        scale: factor on the scores, usually D ** -0.5.
        window: a query at position p sees keys at positions > p - window; 0 sees all.
        soft_cap: scores become cap * tanh(score / cap); 0 is off.
        group: of the layer's cache.
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
        group: int = 0,
    ) -> None:
        assert num_heads % num_kv_heads == 0
        assert window >= 0
        assert soft_cap >= 0.0
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window, self.soft_cap, self.group = scale, window, soft_cap, group

    def __call__(
        self,
        qkv: torch.Tensor,
        batch: StepBatch,
        cache: LayerCache,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Write this step's keys and values into the cache, then attend.

        Args:
            qkv: [T, (H + 2 KH) * D], projections in the order q, k, v.
            cache: this layer's keys and values, [NB, bs, KH, D] each; written at the group's ``kv_slots``.
            cos_sin: float32 [L, Drot], see ``models.rope``.
            q_norm, k_norm: [D] per-head RMSNorm weights applied before the rotation, or None.
            eps: of those norms.

        Returns:
            [T, H * D] in qkv's dtype; zeros on rows that are padding or zombies.
        """
        if batch.num_decode_rows == qkv.shape[0]:
            (k_cache, v_cache), group = cache, batch.groups[self.group]
            together = decode_attention(
                qkv, batch.positions, cos_sin, q_norm, k_norm, eps, group.kv_slots, k_cache, v_cache, self.num_heads,
                group.block_tables, batch.row_slots, batch.query_start, group.seq_lens, batch.arrivals,
                self.scale, self.window, self.soft_cap, batch.max_seq_len_bound,
            )  # fmt: skip
            return cast(torch.Tensor, together).flatten(1)
        return self.attend(self.queries(qkv, batch, cache, cos_sin, q_norm, k_norm, eps), batch, cache)

    def queries(
        self,
        qkv: torch.Tensor,
        batch: StepBatch,
        cache: LayerCache,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """The first half of a call: keys and values are written, and q [T, H, D] is normalised and rotated."""
        (k_cache, v_cache), group = cache, batch.groups[self.group]
        return cast(
            torch.Tensor,
            rope_kv_write(
                qkv, batch.positions, cos_sin, q_norm, k_norm, eps, group.kv_slots, k_cache, v_cache, self.num_heads
            ),
        )

    def attend(self, q: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """The second half: q [T, H, D] of a step whose keys and values are in the cache -> [T, H * D]."""
        group = batch.groups[self.group]
        tables = (group.block_tables, batch.row_slots, batch.query_start, group.seq_lens, batch.arrivals)
        sizes = (batch.num_decode_rows, batch.max_query_len, batch.max_seq_len_bound)
        numbers = (self.scale, self.window, self.soft_cap)
        out = paged_attention(q, *cache, *tables, *numbers, *sizes, batch.decode_rows)
        return cast(torch.Tensor, out).flatten(1)

    def attend_last(self, q: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """The second half for each row's last token alone: q [T, H, D] -> [R, H * D].

        All rows are decode rows then, though their keys are of this step. A decode kernel that starts early may read them
        before it waits, but not before the selection has ended, and that began after they were written.
        """
        last, rows = q.index_select(0, batch.logit_indices), len(batch.row_slots)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        group = batch.groups[self.group]
        tables = (group.block_tables, batch.row_slots, starts, group.seq_lens, batch.arrivals)
        sizes = (rows, 1, batch.max_seq_len_bound)
        out = paged_attention(last, *cache, *tables, self.scale, self.window, self.soft_cap, *sizes)
        return cast(torch.Tensor, out).flatten(1)
