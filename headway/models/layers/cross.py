"""Cross-attention of one layer: a mixer whose keys and values are those of the encoder's outputs, written ahead of the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from headway.attention.cross import CrossAttention
from headway.core.cache import CacheKind, CacheSpec, Part
from headway.models.interface import Target
from headway.models.layers.forms import In
from headway.models.layers.junction import ProjectIn, Stream
from headway.models.layers.linear import Linear, SummedLinear
from headway.models.layers.mixer import Site
from headway.parallel.group import Group
from headway.parallel.shard import HeadShard
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossSpec:
    """Cross-attention, a ``MixerSpec``.

    Attributes:
        num_heads, head_dim: H, D, of queries, keys and values.
        encoder_size: of the encoder's outputs.
        encoder_tokens: most of them.
        scale: factor on the scores; None: D ** -0.5.
        bias: the products have biases.
        unbiased: names of those that have none all the same.
        names: of query, key, value and the product out.
        shard: the heads are these of more; None: they are all.
    """

    num_heads: int
    head_dim: int
    encoder_size: int
    encoder_tokens: int
    scale: float | None = None
    bias: bool = False
    unbiased: tuple[str, ...] = ()
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj")
    shard: HeadShard | None = None
    state = rotated = None

    def sharded(self, group: Group) -> CrossSpec:
        """What this rank of ``group`` has of it.

        Raises:
            UnsupportedModelError: the heads cannot be dealt out.
        """
        shard = HeadShard(group, self.num_heads, self.num_heads)
        return replace(self, num_heads=len(shard.heads), shard=shard)

    @property
    def cache(self) -> CacheSpec:
        """Keys and values of the encoder's outputs."""
        shape = (self.num_heads, self.head_dim)
        return CacheSpec(CacheKind.CROSS, (Part("k", shape), Part("v", shape)), tokens=self.encoder_tokens)

    def make(self, site: Site) -> CrossMixer:
        """See ``MixerSpec``."""
        return CrossMixer(self, site.hidden, dtype=site.dtype, device=site.device)


class CrossMixer(nn.Module):
    """Cross-attention of ``spec``, for hidden states of size ``hidden``.

    Attributes:
        kv: keys and values of encoder outputs.
    """

    whole_heads = False

    def __init__(self, spec: CrossSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        rows = spec.num_heads * spec.head_dim
        query, key, value, out = spec.names
        self.query = Linear(hidden, {query: rows}, bias=spec.bias, dtype=dtype, device=device)
        self.kv = Linear(spec.encoder_size, {key: rows, value: rows}, bias=spec.bias, dtype=dtype, device=device)
        if spec.shard is None:
            self.out = Linear(rows, {out: hidden}, bias=spec.bias, dtype=dtype, device=device)
        else:
            taken, columns = spec.shard.head_rows(spec.head_dim), spec.shard.columns(spec.head_dim)
            self.query.taken, self.kv.taken = {query: taken}, {key: taken, value: taken}
            self.out = SummedLinear(
                rows, {out: hidden}, group=spec.shard.group, columns=columns, bias=spec.bias, dtype=dtype, device=device
            )
        if spec.unbiased and self.kv.bias is not None:
            self.kv.bias.zero_()
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.attend = CrossAttention(
            num_heads=spec.num_heads, num_kv_heads=spec.num_heads, head_dim=spec.head_dim, scale=scale
        )

    @property
    def into(self) -> Linear:
        """See ``Mixer``."""
        return self.query

    def forward(
        self, project: ProjectIn, stream: Stream, form: In, batch: StepBatch, cache: LayerCache, last_only: bool
    ) -> torch.Tensor:
        """See ``Mixer``; the layer's cache is read only."""
        cross = batch.cross
        assert cross is not None, "the house has allocated no encoder outputs"
        q = project(stream, form)
        if last_only:
            q, cross = q.index_select(0, batch.logit_indices), cross.picked(batch.logit_indices)
        return self.attend.attend(q, cross, cache)

    def write(self, encoded: torch.Tensor, places: torch.Tensor, cache: LayerCache) -> None:
        """Keys and values of encoder outputs [N, encoder_size] go to ``places``, int32 [N]."""
        self.attend.write(self.kv.forward(encoded), places, cache)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.query.destinations(prefix) | self.kv.destinations(prefix) | self.out.destinations(prefix)
        for name in self.spec.unbiased:
            del found[f"{prefix}{name}.bias"]
        return found
