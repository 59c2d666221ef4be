"""``SparseIndex``: which cached tokens each token of a layer attends to (DeepSeek-V3.2's lightning indexer).

Scores are made for as many tokens at once as fit a workspace, for contexts of up to the step's bound. Where the bound is no
more than what is selected, everything is, and nothing is scored: that, too, is decided by the bound alone, so a graph decides
it once.

Shapes: T tokens of the step, N of them, HI heads of the indexer of DI, K positions that are selected.
"""

from __future__ import annotations

import torch

from headway.core.ints import cdiv
from headway.kernels.mla_index import index_scores, index_topk, index_write
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache

SCORES = 2**26
"""Most that exist at once."""


class SparseIndex:
    """Numbers only; tensors come with each call. The keys are the second part of the layer's cache.

    Args:
        num_heads, head_dim: HI, DI.
        top: K.
        group: of the layer's cache.
    """

    def __init__(self, *, num_heads: int, head_dim: int, top: int, group: int) -> None:
        self.top, self.group = top, group
        self._scale = (num_heads * head_dim) ** -0.5

    def write(
        self, q: torch.Tensor, k: torch.Tensor, batch: StepBatch, cache: LayerCache, cos_sin: torch.Tensor,
        norm: tuple[torch.Tensor, torch.Tensor, float],
    ) -> None:  # fmt: skip
        """Rotate q [T, HI, DI] in place; normalise (weight, bias, eps), rotate and cache k [T, DI]."""
        index_write(q, k, batch.positions, cos_sin, *norm, batch.groups[self.group].kv_slots, cache[1])

    def selects(self, batch: StepBatch) -> bool:
        """Whether a token of the step may see more than is selected."""
        return batch.max_seq_len_bound > self.top

    def select(
        self, q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, query_start: torch.Tensor, batch: StepBatch,
        cache: LayerCache,
    ) -> torch.Tensor:  # fmt: skip
        """int32 [N, K], see ``index_topk``; behind ``write``.

        Args:
            q: [N, HI, DI], rotated; weights: [N, HI]; positions: int32 [N].
            query_start: int32 [R + 1], where each row's tokens are among them.
        """
        group, number, bound = batch.groups[self.group], q.shape[0], batch.max_seq_len_bound
        selected = torch.empty(number, self.top, dtype=torch.int32, device=q.device)
        tables = group.block_tables, batch.row_slots, query_start, group.seq_lens
        size = max(SCORES // bound, 1)
        for nth in range(cdiv(number, size)):
            first, end = nth * size, min(nth * size + size, number)
            part = slice(first, end)
            scores = index_scores(q[part], weights[part], cache[1], *tables, first, self._scale, bound)
            index_topk(scores, positions[part], selected[part])
        return selected
