"""The sparse indexer beside latent attention: its norm, and which tokens it selects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from headway.attention.mla_index import SparseIndex
from headway.models.interface import Target
from headway.models.layers.mixer import parameter
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSpec:
    """An indexer.

    Attributes:
        num_heads, head_dim: HI, DI.
        top: positions that a token attends to.
        interleaved: rotated pairs of the checkpoint are (2 i, 2 i + 1); else they lie half of the rotated part apart.
        shared: the layer has none and takes what the last layer with one has selected.
    """

    num_heads: int
    head_dim: int
    top: int
    interleaved: bool = False
    shared: bool = False


class Indexer(nn.Module):
    """What selects for one layer; its products are parts of the layer's.

    Args:
        order: int64 [DI], elements of a head as the checkpoint has them, in our order.
    """

    EPS = 1e-6

    def __init__(
        self, spec: IndexSpec, cos_sin: torch.Tensor, order: torch.Tensor, group: int, *, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec, self.cos_sin, self._order = spec, cos_sin, order
        self.weight = parameter(spec.head_dim, dtype=dtype, device=device)
        self.bias = parameter(spec.head_dim, dtype=dtype, device=device)
        self.index = SparseIndex(num_heads=spec.num_heads, head_dim=spec.head_dim, top=spec.top, group=group)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        batch: StepBatch,
        cache: LayerCache,
        last_only: bool,
    ) -> torch.Tensor | None:
        """Cache k and select; None: a token sees no more than would be selected.

        Args:
            q: [T, HI * DI], k: [T, DI], weights: [T, HI].
            last_only: for each row's last token alone.
        """
        q = q.unflatten(1, (self.spec.num_heads, -1))
        self.index.write(q, k, batch, cache, self.cos_sin, (self.weight, self.bias, self.EPS))
        if not self.index.selects(batch):
            return None
        if not last_only:
            return self.index.select(q, weights, batch.positions, batch.query_start, batch, cache)
        last = batch.logit_indices
        starts = torch.arange(len(batch.row_slots) + 1, dtype=torch.int32, device=q.device)
        q, weights, positions = (each.index_select(0, last) for each in (q, weights, batch.positions))
        return self.index.select(q, weights, positions, starts, batch, cache)

    def destinations(self, prefix: str) -> dict[str, Target]:
        return {f"{prefix}weight": Target(self.weight, self._order), f"{prefix}bias": Target(self.bias, self._order)}
