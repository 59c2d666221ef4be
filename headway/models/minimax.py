"""MiniMax: Text-01 and M1, lightning attention and mixtures; M2, full attention and mixtures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.models.blocks import Block, BlockSpec
from headway.models.config import llama_like, map_blocks, read_sizes
from headway.models.decoder import DecoderConfig, DecoderModel
from headway.models.fields import Fields
from headway.models.hybrid import ATTENTION, STATE, kinds_of
from headway.models.interface import WeightMap
from headway.models.layers.forms import LayerForms, LayerProducts
from headway.models.layers.junction import Stream
from headway.models.layers.lightning import LightningSpec
from headway.models.layers.moe import Mixture, RouterSpec
from headway.models.mixtral import NAMES, RESPELLED
from headway.models.mixtures import expert_count, read_mixture, with_mixture
from headway.state.batch import StepBatch
from headway.state.cache_pool import LayerCache

_FACTORS = (
    ("full_attn_{}_factor", "layernorm_full_attention_{}"),
    ("linear_attn_{}_factor", "layernorm_linear_attention_{}"),
    ("mlp_{}_factor", "layernorm_mlp_{}"),
)
"""Fields of weights of the two terms of a sum, behind full attention, lightning attention and mixtures: transformers' name, and
that of released configurations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeighedBlockSpec(BlockSpec):
    """A block whose residual is what its norms give.

    Attributes:
        mixed, fed: (alpha, beta) of the sums behind the mixer and the mixture.
    """

    mixed: tuple[float, float]
    fed: tuple[float, float]

    @property
    def block(self) -> type[Block]:
        """See ``BlockSpec``."""
        return WeighedBlock


class WeighedBlock(Block):
    """n = norm(x); m = norm(alpha n + beta mixer(n)); x = alpha m + beta mixture(m)."""

    spec: WeighedBlockSpec

    @property
    def products(self) -> LayerProducts:
        """See ``Block``: sums are weighed, so no product does one."""
        return LayerProducts(None, None, None, None)

    def forward(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return self._both(stream, batch, cache, forms, last_only=False)

    def forward_last(self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms) -> Stream:
        """See ``Block``."""
        return self._both(stream, batch, cache, forms, last_only=True)

    def _both(
        self, stream: Stream, batch: StepBatch, cache: LayerCache, forms: LayerForms, *, last_only: bool
    ) -> Stream:
        assert self.mixer is not None and isinstance(self.ffn, Mixture)
        x = self.into_mixer.normed(stream)
        mixed = self.mixer.forward(self.into_mixer, Stream(x, x), forms.into_mixer, batch, cache, last_only)
        x = x.index_select(0, batch.logit_indices) if last_only else x
        x = self.into_ffn.normed(Stream(_weighed(x, self.mixer.out.forward(mixed), self.spec.mixed)))
        return Stream(_weighed(x, self.ffn.forward(x, batch.live_tokens(last_only)), self.spec.fed))


def _weighed(x: torch.Tensor, y: torch.Tensor, factors: tuple[float, float]) -> torch.Tensor:
    """alpha x + beta y; both [T, C], y is overwritten."""
    return y.mul_(factors[1]).add_(x, alpha=factors[0])


def _factors(fields: Fields, names: tuple[str, str]) -> tuple[float, float]:
    def read(end: str) -> float:
        found = [name.format(end) for name in names if fields.get(name.format(end)) is not None]
        return fields.number(found[0]) if found else 1.0

    return read("alpha"), read("beta")


class MiniMaxForCausalLM(DecoderModel):
    """Text-01 and M1."""

    def weights(self) -> WeightMap:
        """See ``DecoderModel``; transformers writes what follows from the slopes."""
        found = super().weights()
        return replace(found, computed=(*found.computed, "slope_rate", "query_decay", "key_decay", "diagonal_decay"))

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(rope_theta=1e6, num_experts_per_tok=2, rms_norm_eps=1e-5, num_key_value_heads=8)
        fields = with_rotary_dim(fields)
        layers = fields.count("num_hidden_layers")
        released = fields.get("attn_type_list")
        if released is not None:
            fields = fields.replaced(layer_types=[ATTENTION if kind else STATE for kind in released])
            if not fields.flag("postnorm"):
                raise fields.refuse("postnorm", "is not implemented; true is")
        if fields.get("shared_intermediate_size"):
            raise fields.refuse("shared_intermediate_size", "is not implemented; 0 is")
        if fields.get("sliding_window") is not None:
            raise fields.refuse("sliding_window", "is not implemented; null is")
        fields.with_defaults(hidden_act="silu").choice(
            "hidden_act", {"silu": "", "swish": ""}
        )  # of lightning attention, too
        kinds = kinds_of(fields, [STATE if i % 2 else ATTENTION for i in range(layers)], "layer_types")
        config = llama_like(fields, partial=fields.get("rotary_dim") is not None)
        full, linear, fed = (_factors(fields, names) for names in _FACTORS)
        heads, size = config.blocks[0].attention.num_heads, config.blocks[0].attention.head_dim
        slopes = [2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)]

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            state, depth = kinds[layer] == STATE, 1 - layer / (layers - 1 + 1e-5) + 1e-5
            mixer = LightningSpec(num_heads=heads, head_dim=size, slopes=tuple(depth * slope for slope in slopes))
            return WeighedBlockSpec(
                mixer=mixer if state else block.mixer, ffn=block.ffn, mixed=linear if state else full, fed=fed
            )

        experts = expert_count(fields.with_defaults(num_local_experts=8), "num_local_experts", "num_experts")
        router = RouterSpec(top_k=fields.count("num_experts_per_tok"))
        mixture = read_mixture(fields, experts, router, size="intermediate_size", names=NAMES)
        config = with_mixture(map_blocks(config, change), range(layers), mixture, "block_sparse_moe")
        return replace(config, respelled=RESPELLED)


class MiniMaxM2ForCausalLM(DecoderModel):
    """M2: queries and keys are normalised over all heads, experts chosen by corrected sigmoids."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            rope_theta=5e6, num_experts_per_tok=8, head_dim=128, num_local_experts=256, num_key_value_heads=8
        )
        fields = with_rotary_dim(fields)
        if fields.with_defaults(use_qk_norm=True)["use_qk_norm"] is not True or fields.get("qk_norm_type") not in (
            None, "per_layer",
        ):  # fmt: skip
            raise fields.refuse("qk_norm_type", "with use_qk_norm is not implemented; 'per_layer' and true are")
        if fields.with_defaults(scoring_func="sigmoid")["scoring_func"] != "sigmoid":
            raise fields.refuse("scoring_func", "is not implemented; 'sigmoid' is")
        experts = expert_count(fields, "num_local_experts", "num_experts")
        router = RouterSpec(
            top_k=fields.count("num_experts_per_tok"), scoring="sigmoid", correction="e_score_correction_bias"
        )
        mixture = read_mixture(fields, experts, router, size="intermediate_size", names=NAMES)
        config = llama_like(fields, qk_norm="all", partial=True)
        config = with_mixture(config, range(len(config.blocks)), mixture, "block_sparse_moe")
        return replace(config, respelled=RESPELLED, unused=("mtp.", f"layers.{len(config.blocks)}."))


def with_rotary_dim(fields: Fields) -> Fields:
    """``fields`` in whose place of ``rotary_dim``, which releases have, stands the part of a head that is rotated."""
    dims = fields.get("rotary_dim")
    if dims is None or fields.get("partial_rotary_factor") is not None:
        return fields
    rope = fields.get("rope_parameters") or {}
    if "partial_rotary_factor" in rope:
        return fields
    return fields.replaced(partial_rotary_factor=fields.count("rotary_dim") / read_sizes(fields).head_dim)
