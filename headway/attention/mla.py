"""``LatentAttention``: multi-head latent attention of one layer (DeepSeek-AI 2024), over paged latents.

Rows of few tokens attend to the latents themselves, with queries multiplied into their space. Rows of many tokens make keys
and values: of their own tokens at once, of their context by pieces that fit a workspace (``core.latents`` says which rows are
which). Nothing here asks for a length: kernels read it on the device, grids and the number of pieces come from bounds.

Shapes: T tokens of the step, R rows, H heads, Dn and Dr elements of a query that are not rotated and that are, D = Dn + Dr,
Dv of a value, L of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from headway.core.latents import absorbs_all, short_row
from headway.kernels.head_linear import head_linear
from headway.kernels.mla_decode import mla_decode
from headway.kernels.mla_prefill import mla_gather, mla_prefill
from headway.kernels.mla_write import mla_write
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache

PIECE_BYTES = 2**28
"""Most that the keys and values of a piece of contexts may take."""
LEAST_PIECE = 16
"""Tokens."""
ANY_NUMBER = 2**31 - 1
"""Of a row's tokens."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the rows of queries lie, which need not be all tokens of a step.

    Attributes:
        query_start: int32 [R + 1].
        max_query_len: >= every row's.
        selected: int32 [T, K], see ``mla_decode``; None: tokens see all up to themselves.
    """

    query_start: torch.Tensor
    max_query_len: int
    selected: torch.Tensor | None = None


class LatentAttention:
    """Numbers only; tensors come with each call.

    Args:
        num_heads, nope_dim, rope_dim, value_dim, rank: H, Dn, Dr, Dv, L.
        scale: factor on the scores.
        group: of the layer's cache.
    """

    def __init__(
        self, *, num_heads: int, nope_dim: int, rope_dim: int, value_dim: int, rank: int, scale: float, group: int
    ) -> None:
        self.num_heads, self.nope_dim, self.rope_dim = num_heads, nope_dim, rope_dim
        self.value_dim, self.rank, self.scale, self.group = value_dim, rank, scale, group

    def write(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: StepBatch,
        cache: LayerCache,
        cos_sin: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Rotate q [T, H, D] in place; normalise, rotate and cache kv [T, L + Dr]; returns what was cached, in kv's dtype."""
        slots = batch.groups[self.group].kv_slots
        return cast(torch.Tensor, mla_write(q, kv, batch.positions, cos_sin, norm, eps, slots, cache[0]))

    def __call__(
        self, q: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, batch: StepBatch, cache: LayerCache,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of all tokens, behind ``write``.

        Args:
            q: [T, H, D].
            latent: [T, L + Dr], what ``write`` gave.
            kv_b: [H, Dn + Dv, L], from latents to keys and values.
            selected: int32 [T, K], positions that tokens attend to; None: all up to their own.

        Returns:
            [T, H * Dv]; zeros on rows that are padding or zombies.
        """
        num_tokens, longest = q.shape[0], batch.max_query_len
        out = q.new_empty(num_tokens, self.num_heads, self.value_dim)
        most = ANY_NUMBER
        if selected is None and not absorbs_all(num_tokens, len(batch.row_slots), longest, batch.width):
            most = short_row(batch.width)
            self._expanded(q, latent, kv_b, batch, cache, out, most)
        self._absorbed(q, kv_b, batch, cache, out, Spans(batch.query_start, longest, selected), most)
        return out.flatten(1)

    def attend_last(
        self, q: torch.Tensor, kv_b: torch.Tensor, batch: StepBatch, cache: LayerCache,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of each row's last token alone, of a step whose latents are cached: q [T, H, D] -> [R, H * Dv];
        ``selected`` int32 [R, K] is of these tokens."""
        last = batch.logit_indices
        rows = len(batch.row_slots)
        q = q.index_select(0, last)
        out = q.new_empty(rows, self.num_heads, self.value_dim)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        self._absorbed(q, kv_b, batch, cache, out, Spans(starts, 1, selected), ANY_NUMBER)
        return out.flatten(1)

    def _absorbed(
        self, q: torch.Tensor, kv_b: torch.Tensor, batch: StepBatch, cache: LayerCache, out: torch.Tensor, spans: Spans,
        most: int,
    ) -> None:  # fmt: skip
        """Rows of up to ``most`` tokens attend to latents; their part of ``out`` [T, H, Dv] is written, and zeros where tokens
        belong to no row."""
        group, starts = batch.groups[self.group], spans.query_start
        q_latent = q.new_empty(q.shape[0], self.num_heads, self.rank)
        head_linear(q[..., : self.nope_dim], kv_b[:, : self.nope_dim], q_latent, starts, most)
        mixed = mla_decode(
            q_latent, q, cache[0], group.block_tables, batch.row_slots, starts, group.seq_lens, spans.selected,
            self.scale, most, spans.max_query_len, batch.max_seq_len_bound,
        )  # fmt: skip
        head_linear(mixed.transpose(0, 1), kv_b[:, self.nope_dim :].transpose(1, 2), out, starts, most)

    def _expanded(
        self, q: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, batch: StepBatch, cache: LayerCache,
        out: torch.Tensor, most: int,
    ) -> None:  # fmt: skip
        """Rows of more than ``most`` tokens attend to keys and values; the rest of ``out`` may be overwritten."""
        group, bound = batch.groups[self.group], batch.prefix_bound
        tables = group.block_tables, batch.row_slots, batch.query_start, group.seq_lens
        result, sums = out, None
        if bound:
            result, sums = torch.empty_like(out, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)

        def attend(piece: torch.Tensor, first: int) -> None:
            kv = F.linear(piece[:, : self.rank], kv_b.flatten(0, 1)).unflatten(1, (self.num_heads, -1))
            key = piece[:, self.rank :]
            mla_prefill(q, kv, key, result, sums, *tables[2:], self.scale, first, most, bound)

        attend(latent, -1)
        size = min(self._piece(kv_b), bound)
        for first in range(0, bound, max(size, 1)):
            attend(mla_gather(cache[0], *tables, first, size, most, q.dtype), first)
        if bound:
            out.copy_(result)

    def _piece(self, kv_b: torch.Tensor) -> int:
        """Tokens of contexts that become keys and values at once."""
        return max(PIECE_BYTES // (self.num_heads * kv_b.shape[1] * kv_b.itemsize), LEAST_PIECE)
