"""Multi-head latent attention as a mixer: what lies between its products, around ``LatentAttention``.

Shapes: T tokens of the step, C hidden size; H, Dn, Dr, D, Dv, L as in ``attention.mla``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headway.attention.mla import LatentAttention
from headway.core.cache import CacheSpec, latents
from headway.models.interface import Target
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.forms import In
from headway.models.layers.indexer import Indexer, IndexSpec
from headway.models.layers.junction import ProjectIn, Stream
from headway.models.layers.linear import Linear, SummedLinear
from headway.models.layers.mixer import Site, parameter
from headway.models.layers.norm import RMSNorm
from headway.models.rope import RopeConfig
from headway.parallel.group import Group
from headway.parallel.shard import HeadShard
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class MLASpec:
    """Latent attention.

    Attributes:
        num_heads, nope_dim, rope_dim, value_dim, rank: H, Dn, Dr, Dv, L.
        q_rank: width of the queries' own latent; 0: queries are one product.
        rope: how the rotated part is; None: not at all.
        scale: factor on the scores.
        bias: of the products into both latents and of the one out; the product of whole queries has none.
        norm_eps: of the norms of both latents.
        index: what selects the tokens to attend to; None: all earlier ones are.
        shard: the heads are these of more; None: they are all. Latents and the indexer are every rank's.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    q_rank: int
    rope: RopeConfig | None
    scale: float
    bias: bool = False
    norm_eps: float = 1e-6
    index: IndexSpec | None = None
    shard: HeadShard | None = None
    state = None

    def sharded(self, group: Group) -> MLASpec:
        """What this rank of ``group`` has of it.

        Raises:
            UnsupportedModelError: the heads cannot be dealt out.
        """
        shard = HeadShard(group, self.num_heads, self.num_heads)
        return replace(self, num_heads=len(shard.heads), shard=shard)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.nope_dim + self.rope_dim

    @property
    def cache(self) -> CacheSpec:
        """Latents and rotated keys side by side, and the indexer's keys."""
        index = self.own_index
        return latents(self.rank + self.rope_dim, 0 if index is None else index.head_dim)

    @property
    def own_index(self) -> IndexSpec | None:
        """The indexer, if the layer has one of its own."""
        return None if self.index is None or self.index.shared else self.index

    @property
    def rotated(self) -> AttentionSpec:
        """See ``MixerSpec``: the part of the heads that is rotated."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.rope_dim, rope=self.rope
        )

    def make(self, site: Site) -> MLA:
        """See ``MixerSpec``."""
        return MLA(self, site)


class MLA(nn.Module):
    """The layer of ``spec``: the products of the queries (or of their latent) and of the keys' and values' latent are one
    matrix.

    Args:
        cos_sin: float32 [P, Dr], of ``spec.rope``; shared by layers.
        group: of the layer's cache.

    Attributes:
        kv_b: [H, Dn + Dv, L], from latents to keys and values: read both ways, so it is a matrix wherever it lies.
    """

    whole_heads = False

    def __init__(self, spec: MLASpec, site: Site) -> None:
        super().__init__()
        _, hidden, cos_sin, group, dtype, device = site
        assert cos_sin is not None
        self.spec, self.cos_sin = spec, cos_sin
        queries = spec.num_heads * spec.head_dim
        made: Any = {"dtype": dtype, "device": device}
        first = {"q_a_proj": spec.q_rank} if spec.q_rank else {"q_proj": queries}
        parts = first | {"kv_a_proj_with_mqa": spec.rank + spec.rope_dim}
        self._unbiased = [] if spec.q_rank else ["q_proj"]
        index, behind = spec.own_index, {"q_b_proj": queries}
        self.indexer = None
        if index is not None:
            assert spec.q_rank, "an indexer reads the queries' latent"
            parts |= {"indexer.wk": index.head_dim, "indexer.weights_proj": index.num_heads}
            behind["indexer.wq_b"] = index.num_heads * index.head_dim
            self._unbiased += ["indexer.wk", "indexer.weights_proj"]
            self._index_head = torch.cat([
                pairs_apart(index.interleaved, spec.rope_dim), torch.arange(spec.rope_dim, index.head_dim)
            ])  # fmt: skip
            self.indexer = Indexer(index, cos_sin, self._index_head, group, **made)
        self._sizes, self._behind = tuple(parts.values()), tuple(behind.values())
        self.into = Linear(hidden, parts, bias=spec.bias, **made)
        if self.into.bias is not None:
            for name, part in zip(parts, self.into.bias.split(self._sizes), strict=True):
                if name in self._unbiased:
                    part.zero_()
        self.q_norm, self.q_b = None, None
        if spec.q_rank:
            self.q_norm = RMSNorm(spec.q_rank, spec.norm_eps, **made)
            self.q_b = Linear(spec.q_rank, behind, bias=False, **made)
        self.kv_norm = RMSNorm(spec.rank, spec.norm_eps, **made)
        self.kv_b = parameter(spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank, **made)
        inputs, shard = spec.num_heads * spec.value_dim, spec.shard
        if shard is None:
            self.out = Linear(inputs, {"o_proj": hidden}, bias=spec.bias, **made)
        else:
            columns = shard.columns(spec.value_dim)
            self.out = SummedLinear(
                inputs, {"o_proj": hidden}, group=shard.group, columns=columns, bias=spec.bias, **made
            )
            by_name = {"q_b_proj" if spec.q_rank else "q_proj": shard.head_rows(spec.head_dim)}
            (self.into if self.q_b is None else self.q_b).taken = by_name
        self.attend = LatentAttention(
            num_heads=spec.num_heads, nope_dim=spec.nope_dim, rope_dim=spec.rope_dim, value_dim=spec.value_dim,
            rank=spec.rank, scale=spec.scale, group=group,
        )  # fmt: skip

    def forward(
        self, project: ProjectIn, stream: Stream, form: In, batch: StepBatch, cache: LayerCache, last_only: bool
    ) -> torch.Tensor:
        """See ``Mixer``: [T, H * Dv], or [R, H * Dv] of the rows' last tokens alone."""
        q, kv, *index = project(stream, form).split(self._sizes, dim=1)
        if self.q_norm is not None and self.q_b is not None:
            q, *index_q = self.q_b.forward(self.q_norm.forward(q)).split(self._behind, dim=1)
            index = index_q + index
        q = q.unflatten(1, (self.spec.num_heads, -1))
        latent = self.attend.write(q, kv, batch, cache, self.cos_sin, self.kv_norm.weight, self.kv_norm.eps)
        selected = None
        if self.indexer is not None:
            selected = self.indexer.forward(index[0], index[1], index[2], batch, cache, last_only)
            batch.selected = None if last_only else selected  # layers that follow may share it
        elif self.spec.index is not None and batch.selected is not None:
            selected = batch.selected.index_select(0, batch.logit_indices) if last_only else batch.selected
        if last_only:
            return self.attend.attend_last(q, self.kv_b, batch, cache, selected)
        return self.attend(q, latent, self.kv_b, batch, cache, selected)

    def destinations(self, prefix: str) -> dict[str, Target]:
        spec = self.spec
        turned = pairs_apart(spec.rope is not None and spec.rope.interleaved, spec.rope_dim)
        heads = _heads(spec.num_heads, _behind(spec.nope_dim, turned))
        first = torch.arange(spec.q_rank) if spec.q_rank else heads
        order = torch.cat([first, len(first) + _behind(spec.rank, turned)])
        index = spec.own_index
        if index is not None:
            rest = torch.cat([self._index_head, index.head_dim + torch.arange(index.num_heads)])
            order = torch.cat([order, len(order) + rest])
            heads = torch.cat([heads, len(heads) + _heads(index.num_heads, self._index_head)])
        found = self.into.destinations(prefix, order)
        for name in self._unbiased:
            found.pop(f"{prefix}{name}.bias", None)
        if self.q_norm is not None and self.q_b is not None:
            found |= self.q_norm.destinations(f"{prefix}q_a_layernorm.") | self.q_b.destinations(prefix, heads)
        if self.indexer is not None:
            found |= self.indexer.destinations(f"{prefix}indexer.k_norm.")
        found |= self.kv_norm.destinations(f"{prefix}kv_a_layernorm.") | self.out.destinations(prefix)
        taken = None if spec.shard is None else spec.shard.head_rows(spec.nope_dim + spec.value_dim)
        return found | {f"{prefix}kv_b_proj.weight": Target.part(self.kv_b.flatten(0, 1), taken)}


def pairs_apart(interleaved: bool, size: int) -> torch.Tensor:
    """int64 [size], the checkpoint's rotated elements in the order in which the two of a pair lie half of them apart."""
    if not interleaved:
        return torch.arange(size)
    return torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])


def _behind(size: int, order: torch.Tensor) -> torch.Tensor:
    """``order`` behind ``size`` elements that stay where they are."""
    return torch.cat([torch.arange(size), size + order])


def _heads(number: int, order: torch.Tensor) -> torch.Tensor:
    """``number`` heads one behind the other, the elements of each in ``order``."""
    return (torch.arange(number)[:, None] * len(order) + order).flatten()
