"""Self-attention of one layer: what lies between its products, around ``PagedAttention`` or ``DenseAttention``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from headway.attention.dense import DenseAttention
from headway.attention.flex import FlexRule
from headway.attention.paged import PagedAttention
from headway.core.cache import CacheSpec, keys_and_values
from headway.kernels.rms_norm import rms_norm
from headway.kernels.rope_kv_write import rope_kv_write
from headway.kernels.silu_mul import sigmoid_mul
from headway.kernels.wide_linear import wide_qkv
from headway.kernels.wide_linear.tiles import HEAD_SIZE
from headway.models.interface import Target
from headway.models.layers.forms import In
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
class AttentionSpec:
    """Self-attention.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, KH, D.
        rope: how queries and keys are rotated; None: not at all.
        scale: factor on the scores; None: D ** -0.5.
        causal: a query sees no later tokens. If it does, nothing is cached and texts are not cut.
        window: tokens that a query sees, itself included, on each side where it is not causal; 0: all.
        soft_cap: scores become cap * tanh(score / cap); 0: off.
        chunk: a causal query sees the tokens of its own chunk of so many positions, itself the last; 0: it is not cut.
        sinks: each head's softmax has a learned logit more, the checkpoint's "sinks", which takes weight and gives nothing.
        slopes: per head, times the distance to a key is taken off its score (ALiBi); (): nothing is.
        flex: a rule of the model's own for scores and masks, which no kernel knows (``attention.flex``); None: there is none.
        ahead: where a step says that tokens of a picture see each other, those of this layer do.
        shared_with: an earlier layer, whose keys and values this one reads: it has queries alone. None: it has its own.
        v_norm: values are normalised, too, each head for itself and without a weight.
        keys_are_values: values are what keys are before their norm and rotation.
        qkv_bias, out_bias: which products have biases.
        unbiased: names of products in that have none where ``qkv_bias`` says that the others do (Whisper's keys).
        qk_norm: queries and keys are normalised before the rotation: each "head" for itself, or "all" heads together.
        norm_behind: of "head" norms: they stand behind the rotation. Only their weights know, so that the product of both,
            which a score has as a factor, multiplies rotated queries.
        gated: the result is multiplied by the sigmoid of a gate, which lies behind each head's query in the checkpoint.
        by_head: the checkpoint's one tensor in has, for each key head, its queries, the key and the value.
        names: of the products in the checkpoint: those in, and the one out. Query, key and value may be one tensor.
        norm_names: of the norms of queries and keys; "": their weights are ones.
        temperature: (S, A, B): queries at position p are multiplied by 1 + A ln(1 + floor((p + B) / S)); None: they are not.
        shard: the heads are these of more; None: they are all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    scale: float | None = None
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    chunk: int = 0
    sinks: bool = False
    slopes: tuple[float, ...] = ()
    flex: FlexRule | None = None
    ahead: bool = True
    shared_with: int | None = None
    v_norm: bool = False
    keys_are_values: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    unbiased: tuple[str, ...] = ()
    qk_norm: Literal["", "head", "all"] = ""
    norm_behind: bool = False
    gated: bool = False
    by_head: bool = False
    names: tuple[tuple[str, ...], str] = (("q_proj", "k_proj", "v_proj"), "o_proj")
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    temperature: tuple[float, float, float] | None = None
    shard: HeadShard | None = None
    state = None

    def sharded(self, group: Group) -> AttentionSpec:
        """What this rank of ``group`` has of it.

        Raises:
            UnsupportedModelError: the heads cannot be dealt out.
        """
        shard = HeadShard(group, self.num_heads, self.num_kv_heads)
        slopes = tuple(self.slopes[head] for head in shard.heads) if self.slopes else ()
        return replace(self, num_heads=len(shard.heads), num_kv_heads=len(shard.kv_heads), slopes=slopes, shard=shard)

    @property
    def turning(self) -> int:
        """Columns of the rotary table. Where only a part of a head is rotated, the other dimensions have angles of zero, and
        ``Attention.destinations`` orders a head so that pairs lie half a head apart: kernels that rotate whole heads serve it.
        Not where values are keys, since that would reorder the values, too."""
        if self.rope is not None and self.keys_are_values:
            return self.rope.rotary_dim
        return self.head_dim // 2 * 2

    @property
    def cache(self) -> CacheSpec | None:
        """What the layer caches."""
        if not self.causal:
            return None
        return keys_and_values(self.num_kv_heads, self.head_dim, self.window, self.shared_with, self.chunk)

    @property
    def rotated(self) -> AttentionSpec:
        """See ``MixerSpec``."""
        return self

    def make(self, site: Site) -> Attention:
        """See ``MixerSpec``."""
        return Attention(self, site)


class Attention(nn.Module):
    """One layer's attention, query, key and value projections in one matrix; queries alone where keys are shared."""

    ones: torch.Tensor
    factors: torch.Tensor | None

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__()
        norm, hidden, cos_sin, group, dtype, device = site
        assert cos_sin is not None
        self.spec, self.cos_sin, self.group, self.eps = spec, cos_sin, group, norm.eps
        size = spec.head_dim
        self._q_rows, self._kv_rows = spec.num_heads * size, spec.num_kv_heads * size
        names, out = spec.names
        self._gate_rows = self._q_rows if spec.gated else 0
        shares = spec.shared_with is not None
        own = () if shares else (self._kv_rows,) if spec.keys_are_values else (self._kv_rows, self._kv_rows)
        rows = (self._gate_rows + self._q_rows, *own)
        parts = dict(zip(names, rows, strict=True)) if len(names) > 1 else {names[0]: sum(rows)}
        self.qkv = Linear(hidden, parts, bias=spec.qkv_bias, dtype=dtype, device=device)
        if spec.unbiased and self.qkv.bias is not None:
            self.qkv.bias.zero_()
        self.out = self._product_out(out, hidden, dtype, device)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            q_size, k_size = (size, size) if spec.qk_norm == "head" else (self._q_rows, self._kv_rows)
            self.q_norm = norm.make(q_size, dtype=dtype, device=device)
            self.k_norm = None if shares else norm.make(k_size, dtype=dtype, device=device)
        for name, made in zip(spec.norm_names, (self.q_norm, self.k_norm), strict=True):
            if made is not None and not name:
                made.weight.fill_(1.0)
        self.behind = torch.empty(size, device=device) if spec.norm_behind else None
        factors = None
        if spec.temperature is not None:
            assert spec.qk_norm == "" and spec.causal and not spec.gated, (
                "nothing comes behind the factor but the rotation"
            )
            step, strength, first = spec.temperature
            position = torch.arange(cos_sin.shape[0], dtype=torch.float32, device=device)
            factors = (torch.log1p(torch.floor((position + first) / step)) * strength + 1.0)[:, None]
        self.register_buffer("factors", factors, persistent=False)
        ones = torch.ones(size, dtype=dtype, device=device) if spec.v_norm else None
        self.register_buffer("ones", ones, persistent=False)
        assert spec.causal or not (spec.chunk or spec.sinks or spec.slopes or spec.flex), (
            "texts seen both ways know none of them"
        )
        assert not (spec.v_norm and spec.qk_norm == "all") and (spec.v_norm or not spec.keys_are_values), "have not met"
        assert not spec.norm_behind or (spec.qk_norm == "head" and not spec.gated and spec.causal), "have not met"
        assert not (spec.keys_are_values and spec.rope is not None and spec.rope.interleaved), "have not met"
        assert len(spec.slopes) in (0, spec.num_heads), "one slope a head"
        self.sinks = parameter(spec.num_heads, dtype=torch.float32, device=device) if spec.sinks else None
        slopes = torch.tensor(spec.slopes, dtype=torch.float32, device=device) if spec.slopes else None
        scale, heads = size**-0.5 if spec.scale is None else spec.scale, (spec.num_heads, spec.num_kv_heads)
        self.attend = PagedAttention(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=size,
            scale=scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            chunk=spec.chunk,
            sinks=self.sinks,
            slopes=slopes,
            shares=shares,
            flex=spec.flex,
            group=group,
        )
        self.attend.ahead = spec.ahead
        self.dense = DenseAttention(
            num_heads=heads[0], num_kv_heads=heads[1], scale=scale, reach=spec.window - 1, soft_cap=spec.soft_cap
        )

    def _product_out(self, name: str, hidden: int, dtype: torch.dtype, device: torch.device) -> Linear:
        """Where other ranks have other heads, one whose results are added up; the product in takes the rows of our heads."""
        spec, shard = self.spec, self.spec.shard
        if shard is None:
            return Linear(self._q_rows, {name: hidden}, bias=spec.out_bias, dtype=dtype, device=device)
        if spec.by_head:
            self.qkv.taken = shard.taken_by_head(spec.names[0][0], spec.head_dim)
        else:
            sections = 1 if spec.shared_with is not None else 2 if spec.keys_are_values else 3
            self.qkv.taken = shard.taken(spec.names[0], spec.head_dim, gated=spec.gated, sections=sections)
        columns = shard.columns(spec.head_dim)
        return SummedLinear(
            self._q_rows,
            {name: hidden},
            group=shard.group,
            columns=columns,
            bias=spec.out_bias,
            dtype=dtype,
            device=device,
        )

    def forward(
        self, project: ProjectIn, stream: Stream, form: In, batch: StepBatch, cache: LayerCache, last_only: bool
    ) -> torch.Tensor:
        """Project, write the layer's cache, attend.

        Args:
            project: into the three projections; in ``form``.
            cache: of this layer: keys, values [NB, bs, KH, D] each.
            last_only: attend for each row's last token alone; the cache is written for all.

        Returns:
            [T, H * D], or [R, H * D].
        """
        if not self.spec.causal:
            return self.both_ways(project(stream, form), batch)
        if form is In.WIDE:
            q = self._wide_queries(project.normed(stream), batch, cache)
        else:
            projected = project(stream, form)
            if not last_only:
                return self.mix(projected, batch, cache)
            q = self._queries(projected, batch, cache)
            if self._gate_rows:
                gate = projected[:, : self._gate_rows].index_select(0, batch.logit_indices)
                return cast(torch.Tensor, sigmoid_mul(self.attend.attend_last(q, batch, cache), gate))
        return self.attend.attend_last(q, batch, cache) if last_only else self.attend.attend(q, batch, cache)

    def write_context(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> None:
        """Write the keys and values of x [T, C], normalised already, at the step's places; there are no queries."""
        assert not self._gate_rows and self.factors is None and self.spec.qk_norm != "all", "have not met"
        dense, bias = self.qkv.dense, self.qkv.bias
        if dense is None:
            kv = self.qkv.forward(x)[:, self._q_rows :].contiguous()
        else:
            kv = F.linear(x, dense[self._q_rows :], None if bias is None else bias[self._q_rows :])
        table, _, norm, eps = self._rotation(batch)
        rope_kv_write(kv, batch.positions, table, None, norm, eps, batch.groups[self.group].kv_slots, *cache, 0)

    def both_ways(self, qkv: torch.Tensor, batch: StepBatch, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate and attend within each row's text: projections [T, (H + 2 KH) * D], which are overwritten -> [T, H * D]."""
        qkv = self._normalised(qkv, batch)
        if self.spec.rope is not None or self.spec.qk_norm == "head":
            self.dense.rotate(qkv, batch, *self._rotation(batch))
        return self.dense(qkv, batch, bias)

    @property
    def into(self) -> Linear:
        """See ``Mixer``."""
        return self.qkv

    def mix(self, qkv: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """Projections [T, (H + 2 KH) * D], behind the gate's [T, H * D] if there is one -> [T, H * D]."""
        if self.behind is not None:
            return self.attend.attend(self._queries(qkv, batch, cache), batch, cache)
        mixed = self.attend(self._normalised(qkv, batch), batch, cache, *self._rotation(batch))
        return cast(torch.Tensor, sigmoid_mul(mixed, qkv[:, : self._gate_rows])) if self._gate_rows else mixed

    def _queries(self, qkv: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """Projections -> q [T, H, D], ready to attend; keys and values are in the cache then."""
        q = self.attend.queries(self._normalised(qkv, batch), batch, cache, *self._rotation(batch))
        return q if self.behind is None else q.mul_(self.behind)

    def finalize(self) -> None:
        """Called once, after loading."""
        if self.behind is not None:
            q_norm, k_norm = cast(RMSNorm, self.q_norm), cast(RMSNorm, self.k_norm)
            self.behind = q_norm.weight.float() * k_norm.weight.float()
            for norm in (q_norm, k_norm):
                norm.weight.fill_(1.0)

    def _wide_queries(self, x: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """[T, C] -> q [T, H, D] in one kernel; keys and values are in the cache then."""
        k_cache, v_cache = cache
        q = wide_qkv(
            x,
            self.qkv.weight,
            batch.positions,
            *self._rotation(batch),
            batch.groups[self.group].kv_slots,
            k_cache,
            v_cache,
            self.spec.num_heads,
        )
        return cast(torch.Tensor, q)

    def _normalised(self, qkv: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """[T, (H + 2 KH) * D] without the gate, with norms and factors that no attention kernel has; perhaps in qkv itself."""
        qkv = qkv[:, self._gate_rows :] if self._gate_rows else qkv
        if self.factors is not None:
            q = qkv[:, : self._q_rows] * self.factors.index_select(0, batch.positions)
            return torch.cat([q.to(qkv.dtype), qkv[:, self._q_rows :]], dim=1)
        if self.spec.v_norm and self.spec.shared_with is None:
            kept = qkv[:, -self._kv_rows :]
            v = cast(torch.Tensor, rms_norm(kept.reshape(-1, self.spec.head_dim), self.ones, self.eps)).view_as(kept)
            if self.spec.keys_are_values:
                return torch.cat([qkv, v], dim=1)
            kept.copy_(v)
            return qkv
        if self.spec.qk_norm != "all":
            return qkv
        q, k, v = qkv.split((self._q_rows, self._kv_rows, self._kv_rows), dim=1)
        assert self.q_norm is not None and self.k_norm is not None
        if self.spec.shard is not None:
            q, k = self.spec.shard.normalised(q, k, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
            return torch.cat([q, k, v], dim=1)
        return torch.cat([self.q_norm.forward(q), self.k_norm.forward(k), v], dim=1)

    def _rotation(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float]:
        """Table, norms of heads, and their eps."""
        table = self.cos_sin if batch.cos_sin is None else batch.cos_sin
        if self.spec.qk_norm != "head":
            return table, None, None, self.eps
        q_norm, k_norm = cast(RMSNorm, self.q_norm), cast("RMSNorm | None", self.k_norm)
        return table, q_norm.weight, None if k_norm is None else k_norm.weight, self.eps

    @property
    def is_plain(self) -> bool:
        """Whether products, norms of heads, rotation and attention are all there is."""
        spec = self.spec
        more = (self._gate_rows, self.behind is not None, self.factors is not None, spec.v_norm, spec.qk_norm == "all")
        return spec.causal and spec.shared_with is None and spec.flex is None and not any(more)

    @property
    def whole_heads(self) -> bool:
        """Whether ``wide_qkv`` can do it at all."""
        spec = self.spec
        whole = spec.head_dim == self.cos_sin.shape[1] == HEAD_SIZE and spec.qk_norm != "all" and spec.causal
        plain = (
            self.qkv.bias is None
            and self.factors is None
            and not spec.gated
            and not spec.norm_behind
            and not spec.v_norm
            and spec.shared_with is None
        )
        return whole and plain and spec.num_heads % 2 == spec.num_kv_heads % 2 == 0

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.qkv.destinations(prefix, self._rows()) | self.out.destinations(prefix)
        for name in self.spec.unbiased:
            del found[f"{prefix}{name}.bias"]
        for name, norm in zip(self.spec.norm_names, (self.q_norm, self.k_norm), strict=True):
            if norm is not None and name:
                own, of = self._order(norm.weight.shape[0] // self.spec.head_dim), None
                if self.spec.shard is not None and self.spec.qk_norm == "all":
                    taken, of = self.spec.shard.norm_rows(self.spec.head_dim, queries=norm is self.q_norm)
                    own = taken if own is None else taken[own]
                found |= {
                    key: Target(each.tensor, own, of) for key, each in norm.destinations(f"{prefix}{name}.").items()
                }
        if self.sinks is not None:
            ranks_heads = None if self.spec.shard is None else self.spec.shard.head_rows()
            found[f"{prefix}sinks"] = Target.part(self.sinks, ranks_heads)
        return found

    def _rows(self) -> torch.Tensor | None:
        """int64, the checkpoint's rows in our order: gates, queries, keys, values; None: they lie so."""
        sections = None
        if self._gate_rows:
            sections = self._gates_first()
        if self.spec.by_head and self.spec.shard is None:  # what is taken for a shard is in our order
            sections = self._sections_of_heads()
        order = self._order(self.spec.num_heads + self.spec.num_kv_heads)
        if order is None:
            return sections
        first, last = self._gate_rows, self._gate_rows + len(order)
        values = torch.arange(last, last + self._kv_rows)  # are not rotated
        own = torch.cat([torch.arange(first), order + first, values])
        return own if sections is None else sections[own]

    def _gates_first(self) -> torch.Tensor:
        """int64, the checkpoint's rows, a query and a gate for each head, in our order: gates, queries, keys, values."""
        size = self.spec.head_dim
        heads = torch.arange(2 * self._q_rows).view(self.spec.num_heads, 2, size)
        rest = torch.arange(2 * self._q_rows, 2 * (self._q_rows + self._kv_rows))
        return torch.cat([heads[:, 1].flatten(), heads[:, 0].flatten(), rest])

    def _sections_of_heads(self) -> torch.Tensor:
        """int64, the checkpoint's rows, (queries, key, value) for each key head, in our order: queries, keys, values."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        rows = torch.arange(self._q_rows + 2 * self._kv_rows).view(
            self.spec.num_kv_heads, group + 2, self.spec.head_dim
        )
        return torch.cat([rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()])

    def _order(self, heads: int) -> torch.Tensor | None:
        """Elements of ``heads`` heads as the checkpoint has them, int64 [heads * D], in the order in which the two of a pair
        lie half of the table's columns apart, with those that are not rotated between; None: they do."""
        rope, size, columns = self.spec.rope, self.spec.head_dim, self.spec.turning
        if rope is None or (columns == rope.rotary_dim and not rope.interleaved):
            return None
        rotated, still = torch.arange(rope.rotary_dim), torch.arange(rope.rotary_dim, columns).view(2, -1)
        pairs = rotated.view(-1, 2).T if rope.interleaved else rotated.view(2, -1)
        head = torch.cat([torch.cat([pairs, still], dim=1).flatten(), torch.arange(columns, size)])
        return (torch.arange(heads)[:, None] * size + head).flatten()
