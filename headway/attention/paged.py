"""``PagedAttention``: rotary embedding, KV write and causal attention of one layer, over the paged cache.

Shapes: T tokens of the step, H query heads, KH key/value heads, D head size, NB blocks of bs tokens, L positions.
"""

from __future__ import annotations

from typing import cast

import torch

from headway.attention.flex import FlexAttention, FlexRule
from headway.kernels.decode_attention import decode_attention
from headway.kernels.decode_attention.reference import heads_to_write
from headway.kernels.paged_attention import paged_attention
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.span_attention import span_attention
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


def most_tokens(batch: StepBatch, tokens: int) -> int:
    """Tokens of a row, at most, in a step of ``tokens`` whose rows all go on with a generation, perhaps with drafts; 0: it has
    others."""
    if batch.num_decode_rows == tokens:
        return 1
    drafts = 1 < batch.max_query_len <= batch.width and tokens <= batch.width * len(batch.row_slots)
    return batch.width if drafts and not batch.num_decode_rows and batch.ends is None else 0


class PagedAttention:
    """Causal grouped-query attention of one layer. Holds numbers, and tensors of one number a head; others come with each call.

    Args:
        num_heads, num_kv_heads, head_dim: H, KH, D; H is a multiple of KH.
        scale: factor on the scores, usually D ** -0.5.
        window: a query at position p sees keys at positions > p - window; 0 sees all.
        soft_cap: scores become cap * tanh(score / cap); 0 is off.
        chunk: a query sees the keys of its own chunk of so many positions; 0: all. With a window there is none.
        sinks: float32 [H], a logit more in each head's softmax, without a value; None: there is none.
        slopes: float32 [H], times the distance to a key is taken off its score (ALiBi); None: nothing is.
        flex: a model's own rule, under which torch attends instead of kernels; None: there is none.
        shares: keys and values are another layer's, so that what comes in are queries alone, and nothing is written. That layer
            is of the same group and comes first in a step.
        group: of the layer's cache.

    Attributes:
        ahead: tokens that ``StepBatch.ends`` names see later ones.
    """

    ahead = True

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        chunk: int = 0,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        shares: bool = False,
        flex: FlexRule | None = None,
        group: int = 0,
    ) -> None:
        assert num_heads % num_kv_heads == 0
        assert window >= 0
        assert soft_cap >= 0.0
        assert not (window and chunk)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.window, self.soft_cap, self.group = scale, window, soft_cap, group
        self.extras, self.shares, self.flex = (chunk, sinks, slopes), shares, None
        if flex is not None:
            rule = ScoreRule(scale, window, soft_cap, chunk, sinks, slopes)
            self.flex = FlexAttention(rule, flex, group)

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
            qkv: [T, (H + 2 KH) * D], projections in the order q, k, v; [T, H * D] of one that ``shares``.
            cache: this layer's keys and values, [NB, bs, KH, D] each; written at the group's ``kv_slots``.
            cos_sin: float32 [L, Drot], see ``models.rope``.
            q_norm, k_norm: [D] per-head RMSNorm weights applied before the rotation, or None.
            eps: of those norms.

        Returns:
            [T, H * D] in qkv's dtype; zeros on rows that are padding or zombies.
        """
        width = most_tokens(batch, qkv.shape[0])
        late = self.shares and batch.reads_this_step  # the row's other keys may be of this step
        if width and not late and self.flex is None:
            assert not batch.reads_this_step, "keys of the rows' other tokens were not made"
            (k_cache, v_cache), group = cache, batch.groups[self.group]
            together = decode_attention(
                qkv, batch.positions, cos_sin, q_norm, k_norm, eps, group.kv_slots, k_cache, v_cache, self.num_heads,
                group.block_tables, batch.row_slots, batch.query_start, group.seq_lens, batch.arrivals,
                self.scale, self.window, self.soft_cap, batch.max_seq_len_bound, *self.extras, width, self.shares,
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
        written = heads_to_write(k_cache, v_cache, self.shares)
        q = rope_kv_write(qkv, batch.positions, cos_sin, q_norm, k_norm, eps, group.kv_slots, *written, self.num_heads)
        return cast(torch.Tensor, q)

    def attend(self, q: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """The second half: q [T, H, D] of a step whose keys and values are in the cache -> [T, H * D]."""
        if self.flex is not None:
            return self.flex(q, batch, cache).flatten(1)
        group = batch.groups[self.group]
        numbers = (self.scale, self.window, self.soft_cap)
        if batch.ends is not None and self.ahead:
            assert self.extras == (0, None, None), "spans have met neither chunks nor sinks nor slopes"
            read = (group.block_tables, batch.row_slots, batch.query_start, group.seq_lens, batch.ends)
            seen = span_attention(q, *cache, *read, *numbers, batch.max_query_len, batch.max_seq_len_bound)
            return cast(torch.Tensor, seen).flatten(1)
        tables = (group.block_tables, batch.row_slots, batch.query_start, group.seq_lens, batch.arrivals)
        sizes = (batch.num_decode_rows, batch.max_query_len, batch.max_seq_len_bound)
        out = paged_attention(
            q, *cache, *tables, *numbers, *sizes, batch.decode_rows, *self.extras, batch.reads_this_step,
            max(1, most_tokens(batch, q.shape[0])),
        )  # fmt: skip
        return cast(torch.Tensor, out).flatten(1)

    def attend_last(self, q: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """The second half for each row's last token alone: q [T, H, D] -> [R, H * D].

        All rows are decode rows then, though their keys are of this step, which the kernel is told.
        """
        if self.flex is not None:
            return self.flex(q.index_select(0, batch.logit_indices), batch.of_last_tokens(), cache).flatten(1)
        last, rows = q.index_select(0, batch.logit_indices), len(batch.row_slots)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        group = batch.groups[self.group]
        tables = (group.block_tables, batch.row_slots, starts, group.seq_lens, batch.arrivals)
        sizes = (rows, 1, batch.max_seq_len_bound)
        out = paged_attention(
            last, *cache, *tables, self.scale, self.window, self.soft_cap, *sizes, None, *self.extras, True
        )
        return cast(torch.Tensor, out).flatten(1)
