"""Zamba2's shared transformer blocks: a few of them, used by many layers, each use with low-rank adapters of its own.

A use reads the residual x and the embeddings e that the model began with, and gives what its Mamba-2 mixer reads besides x:

    n = norm([x, e]);  h = attention(n);  y = feed_forward(norm(h));  linear(y)           x += mamba(norm(x + linear(y)))

Nothing is added to the residual in between. Products of queries, keys, values, gates and ups are the block's plus up(down(n))
of the use's adapters (Glorioso et al. 2024, arXiv:2411.15242). Weights of a block lie in memory once.

Shapes: T tokens of the step, C hidden size, r rank of the adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from headway.core.cache import CacheSpec
from headway.models.interface import Target
from headway.models.layers.activation import activation
from headway.models.layers.attention import Attention, AttentionSpec
from headway.models.layers.linear import Linear
from headway.models.layers.mamba import Mamba2, Mamba2Spec
from headway.models.layers.mixer import Mixer, Site
from headway.models.layers.norm import NormSpec
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpec:
    """A shared block.

    Attributes:
        attention: reads 2 C, gives C.
        inner, activation: of its gated feed-forward part.
        bias: of the latter's products.
        rank: r; attention_adapters: whether uses adapt queries, keys and values, too.
    """

    attention: AttentionSpec
    inner: int
    activation: str
    bias: bool
    rank: int
    attention_adapters: bool


class SharedBlock(nn.Module):
    """The weights of ``spec``."""

    def __init__(
        self, spec: SharedSpec, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, heads = spec.attention.head_dim, (spec.attention.num_heads, spec.attention.num_kv_heads)
        rows = {"q_proj": heads[0] * size, "k_proj": heads[1] * size, "v_proj": heads[1] * size}
        self.first_norm = norm.make(2 * hidden, dtype=dtype, device=device)
        self.qkv = Linear(2 * hidden, rows, bias=False, dtype=dtype, device=device)
        self.out = Linear(rows["q_proj"], {"o_proj": hidden}, bias=False, dtype=dtype, device=device)
        self.ffn_norm = norm.make(hidden, dtype=dtype, device=device)
        self.gate_up = Linear(hidden, {"gate_up_proj": 2 * spec.inner}, bias=spec.bias, dtype=dtype, device=device)
        self.down = Linear(spec.inner, {"down_proj": hidden}, bias=spec.bias, dtype=dtype, device=device)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.first_norm.destinations(f"{prefix}input_layernorm.")
        found |= self.ffn_norm.destinations(f"{prefix}pre_ff_layernorm.")
        for name, products in (("self_attn", (self.qkv, self.out)), ("feed_forward", (self.gate_up, self.down))):
            for product in products:
                found |= product.destinations(f"{prefix}{name}.")
        return found


class Adapter(nn.Module):
    """What is added to a product [T, K] -> [T, N1 + N2 + ...]: for each of its parts ``n`` up_n(down_n(x)).

    Args:
        parts: name in the checkpoint, without number and ending -> rows.
        use: number of the use among all.
    """

    def __init__(
        self, inputs: int, parts: dict[str, int], rank: int, use: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._rows, self._rank = tuple(parts.values()), rank
        names = [f"{name}.{use}" for name in parts]
        self.down = Linear(inputs, {f"{name}.0": rank for name in names}, bias=False, dtype=dtype, device=device)
        self.up = nn.ModuleList(
            Linear(rank, {f"{name}.1": rows}, bias=False, dtype=dtype, device=device)
            for name, rows in zip(names, self._rows, strict=True)
        )

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [T, N] += what x [T, K] gives; returns y."""
        lows = self.down.forward(x).split(self._rank, dim=1)
        for low, up, part in zip(lows, self.up, y.split(self._rows, dim=1), strict=True):
            part += up(low.contiguous())
        return y

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.down.destinations(prefix)
        for up in self.up:
            assert isinstance(up, Linear)
            found |= up.destinations(prefix)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedUseSpec:
    """The mixer of a layer that uses a shared block.

    Attributes:
        shared, mamba: the block, and what stands behind it.
        use: number of the use among all.
    """

    shared: SharedSpec
    mamba: Mamba2Spec
    use: int = field(compare=False)

    @property
    def cache(self) -> CacheSpec | None:
        return self.shared.attention.cache

    @property
    def state(self) -> CacheSpec:
        return self.mamba.state

    @property
    def rotated(self) -> AttentionSpec:
        return self.shared.attention

    def make(self, site: Site) -> Mixer:
        return SharedUse(self, site)


class SharedUse(Mamba2):
    """The Mamba-2 mixer, and what is this use's own of the shared block."""

    def __init__(self, spec: SharedUseSpec, site: Site) -> None:
        hidden, dtype, device = site.hidden, site.dtype, site.device
        super().__init__(spec.mamba, hidden, dtype=dtype, device=device)
        shared, attention = spec.shared, spec.shared.attention
        self.attention = Attention(attention, site._replace(hidden=1))
        del self.attention.qkv, self.attention.out  # the shared block has them
        self.act = activation(shared.activation, gated=True)
        keys = attention.num_kv_heads * attention.head_dim
        heads = {"q": attention.num_heads * attention.head_dim, "k": keys, "v": keys}
        names = {f"linear_{name}_adapter_list": rows for name, rows in heads.items()}
        self.adapt_heads = None
        if shared.attention_adapters:
            self.adapt_heads = Adapter(2 * hidden, names, shared.rank, spec.use, dtype=dtype, device=device)
        inner = {"gate_up_proj_adapter_list": 2 * shared.inner}
        self.adapt_inner = Adapter(hidden, inner, shared.rank, spec.use, dtype=dtype, device=device)
        self.linear = Linear(hidden, {"linear": hidden}, bias=False, dtype=dtype, device=device)

    def beside(
        self, block: SharedBlock, x: torch.Tensor, embedded: torch.Tensor, batch: StepBatch, cache: LayerCache
    ) -> torch.Tensor:
        """What the mixer reads besides the residual x [T, C]; embedded [T, C]; writes keys and values to ``cache``."""
        normed = block.first_norm.forward(torch.cat([x, embedded], dim=1))
        qkv = block.qkv.forward(normed)
        if self.adapt_heads is not None:
            qkv = self.adapt_heads.add(normed, qkv)
        attended = block.out.forward(self.attention.mix(qkv, batch, cache))
        normed = block.ffn_norm.forward(attended)
        inner = self.act(self.adapt_inner.add(normed, block.gate_up.forward(normed)))
        return self.linear.forward(block.down.forward(inner))

    def shared_destinations(self, prefix: str) -> dict[str, Target]:
        """Checkpoint tensor name, beginning with the shared block's prefix -> where it goes."""
        found = self.adapt_inner.destinations(f"{prefix}feed_forward.")
        if self.adapt_heads is not None:
            found |= self.adapt_heads.destinations(f"{prefix}self_attn.")
        return found
