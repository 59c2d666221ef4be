"""LFM2: gated short convolutions, and attention every few layers."""

from __future__ import annotations

from dataclasses import replace

from headway.models.blocks import BlockNames, BlockSpec
from headway.models.config import llama_like, map_blocks
from headway.models.decoder import DecoderConfig, DecoderModel, DecoderNames
from headway.models.fields import Fields
from headway.models.hybrid import ATTENTION, STATE, kinds_of
from headway.models.layers.attention import AttentionSpec
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.moe import RouterSpec
from headway.models.layers.short_conv import ShortConvSpec
from headway.models.mixtral import NAMES
from headway.models.mixtures import expert_count, read_mixture, with_mixture

_NAMES = BlockNames(before_mixer="operator_norm", before_ffn="ffn_norm", ffn="feed_forward")


class Lfm2ForCausalLM(DecoderModel):
    """The dense ones."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            max_position_embeddings=128_000, num_key_value_heads=8, norm_eps=1e-5, conv_L_cache=3, block_multiple_of=256,
            block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, rope_theta=1e6,
            tie_word_embeddings=fields.get("tie_embedding", True), intermediate_size=fields.get("block_ff_dim", 12288),
        )  # fmt: skip
        layers = fields.count("num_hidden_layers")
        full = fields.get("full_attn_idxs")
        attends = range(layers) if full is None else full
        kinds = kinds_of(fields, [ATTENTION if i in attends else STATE for i in range(layers)], "layer_types")
        config = llama_like(fields, qk_norm="head", names=_NAMES, eps="norm_eps")
        conv = ShortConvSpec(size=config.hidden_size, taps=fields.count("conv_L_cache"), bias=fields.flag("conv_bias"))
        inner = _inner(fields)

        def change(layer: int, block: BlockSpec) -> BlockSpec:
            assert isinstance(block.mixer, AttentionSpec) and isinstance(block.ffn, MLPSpec)
            block = replace(block, ffn=replace(block.ffn, size=inner, names=(("w1", "w3"), "w2")))
            if kinds[layer] == STATE:
                return replace(block, mixer=conv, names=replace(_NAMES, mixer="conv"))
            projections = ("q_proj", "k_proj", "v_proj")
            return replace(
                block,
                mixer=replace(
                    block.attention, names=(projections, "out_proj"), norm_names=("q_layernorm", "k_layernorm")
                ),
            )

        return replace(map_blocks(config, change), names=DecoderNames(norm="model.embedding_norm"))


class Lfm2MoeForCausalLM(DecoderModel):
    """LFM2-8B-A1B: behind the first layers mixtures, chosen by sigmoids that a bias may correct."""

    @staticmethod
    def read(fields: Fields) -> DecoderConfig:
        fields = fields.with_defaults(
            intermediate_size=7168, block_auto_adjust_ff_dim=False, num_dense_layers=2, num_experts=32, num_experts_per_tok=4,
            moe_intermediate_size=1792, norm_topk_prob=True, use_expert_bias=True, routed_scaling_factor=1.0,
        )  # fmt: skip
        config, dense = Lfm2ForCausalLM.read(fields), fields.whole("num_dense_layers")
        router = RouterSpec(
            top_k=fields.count("num_experts_per_tok"),
            scoring="sigmoid",
            renormalise=fields.flag("norm_topk_prob"),
            scale=fields.number("routed_scaling_factor"),
            correction="expert_bias" if fields.flag("use_expert_bias") else "",
        )
        experts = expert_count(fields, "num_experts", "num_local_experts")
        mixture = read_mixture(fields, experts, router, names=NAMES)
        return with_mixture(config, range(dense, len(config.blocks)), mixture)


def _inner(fields: Fields) -> int:
    """Width of the feed-forward blocks."""
    inner = fields.count("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return inner
    inner = int(2 * inner / 3)
    if fields.get("block_ffn_dim_multiplier") is not None:
        multiple = fields.count("block_multiple_of")
        inner = multiple * -(-int(fields.number("block_ffn_dim_multiplier") * inner) // multiple)
    if inner < 1:
        raise fields.refuse("intermediate_size", "leaves feed-forward blocks without units")
    return inner
