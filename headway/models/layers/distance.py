"""Self-attention whose scores have a learned bias by distance, the same in all layers (T5's decoder)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from headway.kernels.distance_attention import distance_attention
from headway.models.interface import Target
from headway.models.layers.attention import Attention, AttentionSpec
from headway.models.layers.forms import In
from headway.models.layers.junction import ProjectIn, Stream
from headway.models.layers.mixer import Site, parameter
from headway.models.position_bias import causal_bucket
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceSpec(AttentionSpec):
    """Attention that reads a ``DistanceBias``."""

    def make(self, site: Site) -> DistanceAttention:
        """See ``MixerSpec``."""
        return DistanceAttention(self, site)


class DistanceAttention(Attention):
    """One layer's.

    Attributes:
        table: f32 [H, L], the model's bias, of all ranks' heads; set before the first step.
    """

    table: torch.Tensor
    whole_heads = False

    def forward(
        self, project: ProjectIn, stream: Stream, form: In, batch: StepBatch, cache: LayerCache, last_only: bool
    ) -> torch.Tensor:
        """See ``Mixer``."""
        q = self.attend.queries(project(stream, form), batch, cache, *self._rotation(batch))
        group, numbers = batch.groups[self.group], (self.attend.scale, batch.max_seq_len_bound)
        tables = (group.block_tables, batch.row_slots, batch.query_start, group.seq_lens)
        shard = self.spec.shard
        table = self.table if shard is None else self.table[shard.heads.start : shard.heads.stop]
        out = cast(torch.Tensor, distance_attention(q, *cache, *tables, table, *numbers)).flatten(1)
        return out.index_select(0, batch.logit_indices) if last_only else out


class DistanceBias(nn.Module):
    """The bias of each head by distance: one for each bucket of distances, which are logarithmic.

    Attributes:
        table: f32 [H, longest], once ``finalize`` has been called.
    """

    def __init__(self, name: str, heads: int, buckets: int, most: int, longest: int, *, device: torch.device) -> None:
        super().__init__()
        self._name, self._buckets, self._most, self._longest = name, buckets, most, longest
        self.learned = parameter(buckets, heads, dtype=torch.float32, device=device)
        self.table = torch.zeros(heads, longest, device=device)

    def destinations(self) -> dict[str, Target]:
        """Checkpoint tensor name -> where it goes."""
        return {f"{self._name}.weight": Target(self.learned)}

    def finalize(self) -> None:
        """Called once, after loading."""
        bucket = causal_bucket(torch.arange(self._longest), self._buckets, self._most)
        self.table.copy_(self.learned[bucket.to(self.learned.device)].T)
