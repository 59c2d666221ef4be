"""The blocks of Gemma 4: a per-layer input and a scalar behind each, in some models a mixture beside the dense part.

With a mixture, r being the residual behind attention, each part reads r behind a norm of its own and has one behind it:

    x = r + norm(norm(mlp(norm(r))) + norm(experts(norm(r))))

The router reads r, too, divided by its length and times a learned vector and C^-1/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from headway.models.blocks import Block, BlockSpec
from headway.models.fields import Fields
from headway.models.interface import Stack, Target
from headway.models.layers.forms import PLAIN, LayerForms, LayerProducts
from headway.models.layers.junction import Stream
from headway.models.layers.mixer import parameter
from headway.models.layers.mlp import MLP
from headway.models.layers.moe import MixtureSpec, RouterSpec
from headway.models.layers.norm import Norm, NormSpec, RMSNorm
from headway.models.layers.per_layer import PerLayerGate
from headway.models.mixtures import check_router, expert_count
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerBlockSpec(BlockSpec):
    """A block behind which a gated per-layer input is added.

    Attributes:
        layer: its index.
        side: size of its input; 0: it has none.
        side_act: of the gate.
    """

    layer: int
    side: int
    side_act: str

    @property
    def block(self) -> type[Block]:
        """See ``BlockSpec``."""
        return PerLayerBlock


class PerLayerBlock(Block):
    """x = (block(x) + gate(block(x), input)) * scalar."""

    spec: PerLayerBlockSpec

    def _build(self, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super()._build(norm, hidden, dtype=dtype, device=device)
        spec = self.spec
        self.gate = None
        if spec.side:
            self.gate = PerLayerGate(spec.side, spec.side_act, norm, hidden, dtype=dtype, device=device)
        self.scalar = parameter(1, dtype=dtype, device=device)

    def link(self, next_norm: Norm | None) -> None:
        """See ``Block``; the scalar multiplies the last sum."""
        super().link(next_norm if self.gate is None else None)
        if self.gate is not None:
            self.gate.link(next_norm, self.scalar)

    @property
    def _last_scale(self) -> torch.Tensor | None:
        return self.scalar if self.gate is None else None

    @property
    def products(self) -> LayerProducts:
        """See ``Block``."""
        if self.gate is None:
            return super().products
        into_side, out_of_side = self.gate.products
        return super().products._replace(into_side=into_side, out_of_side=out_of_side)

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return self._side(super().forward(stream, batch, cache, forms), stream.beside, forms)

    def forward_last(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        beside = None if stream.beside is None else stream.beside.index_select(0, batch.logit_indices)
        return self._side(super().forward_last(stream, batch, cache, forms), beside, PLAIN)

    def _side(self, stream: Stream, beside: torch.Tensor | None, forms: LayerForms) -> Stream:
        if self.gate is not None:
            assert beside is not None
            stream = self.gate.add(stream, beside[:, self.spec.layer], forms)
        return stream._replace(beside=beside)

    def destinations(self, prefix: str) -> dict[str, Target]:
        """See ``Block``."""
        found = super().destinations(prefix) | {f"{prefix}layer_scalar": Target(self.scalar)}
        return found if self.gate is None else found | self.gate.destinations(prefix)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureBlockSpec(PerLayerBlockSpec):
    """The same with ``mixture`` beside the dense part."""

    mixture: MixtureSpec

    @property
    def block(self) -> type[Block]:
        """See ``BlockSpec``."""
        return MixtureBlock


class MixtureBlock(PerLayerBlock):
    """The mixture's tensors lie in the layer itself."""

    spec: MixtureBlockSpec

    def _build(self, norm: NormSpec, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super()._build(norm, hidden, dtype=dtype, device=device)
        spec = self.spec
        self.mixture = spec.mixture.make(hidden, dtype=dtype, device=device)
        self.router_norm = RMSNorm(hidden, norm.eps, dtype=dtype, device=device)
        self.expert_scale = parameter(spec.mixture.num_experts, dtype=dtype, device=device)
        self.after_dense, self.before_experts, self.after_experts = (
            norm.make(hidden, dtype=dtype, device=device) for _ in range(3)
        )

    @property
    def products(self) -> LayerProducts:
        """See ``Block``: what stands behind attention is no single product."""
        return super().products._replace(out_of_mixer=None, into_ffn=None, out_of_ffn=None)

    def link(self, next_norm: Norm | None) -> None:
        """See ``Block``; scales become part of weights."""
        super().link(next_norm)
        self.router_norm.weight.mul_(self.router_norm.weight.shape[0] ** -0.5)
        self.mixture.down.mul_(self.expert_scale[:, None, None])

    def _feed_forward(self, stream: Stream, batch: StepBatch, forms: LayerForms, last_only: bool = False) -> Stream:
        r, dense = stream.residual, cast(MLP, self.ffn)
        y = dense.down.forward(dense.act(dense.gate_up.forward(self.into_ffn.normed(stream))))
        y = self.after_dense.forward(y)
        live, routed_by = batch.live_tokens(last_only), self.router_norm.forward(r)
        y += self.after_experts.forward(
            self.mixture.forward(self.before_experts.forward(r), live, batch.most_tokens, routed_by)
        )
        return self.out_of_ffn.add(y, r)

    def destinations(self, prefix: str) -> dict[str, Target]:
        """See ``Block``."""
        found = super().destinations(prefix) | self.mixture.destinations(prefix)
        found |= {f"{prefix}router.scale": Target(self.router_norm.weight)}
        found |= {f"{prefix}router.per_expert_scale": Target(self.expert_scale)}
        norms = {"post_feedforward_layernorm_1": self.after_dense, "pre_feedforward_layernorm_2": self.before_experts}
        norms["post_feedforward_layernorm_2"] = self.after_experts
        for name, norm in norms.items():
            found |= norm.destinations(f"{prefix}{name}.")
        return found

    def stacks(self, prefix: str) -> dict[str, Stack]:
        """See ``Block``."""
        return self.mixture.stacks(prefix)

    @property
    def token_weights(self) -> int:
        """See ``Block``."""
        experts = sum(parameter.numel() for parameter in self.mixture.parameters())
        return super().token_weights - experts + self.mixture.token_weights


def read_routed(fields: Fields, act: str) -> MixtureSpec:
    """The mixture of a config.json.

    Raises:
        UnsupportedModelError: sizes are missing, or do not fit together.
    """
    experts = expert_count(fields, "num_experts")
    router = RouterSpec(top_k=fields.count("top_k_experts"), name="router.proj")
    check_router(fields, experts, router)
    return MixtureSpec(num_experts=experts, size=fields.count("moe_intermediate_size"), router=router, activation=act)
